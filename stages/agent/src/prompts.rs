//! Prompts: Markdown files with places to fill in, and the conversation that they make.
//!
//! | file | is | places |
//! |---|---|---|
//! | `system.md` | the system's message; left out where it is empty | |
//! | `task.md` | the request for a candidate | `{code}` `{contract}` `{parameters}` `{steps}` |
//! | `steps.md` | what stands for `{steps}` in it, where the task has steps | `{lines}` |
//! | `loops.md` | the same where the steps are a thread's, with loops | `{lines}` |
//! | `prefill.md` | how the assistant's answer begins; empty for no prefill | `{code}` `{contract}` `{parameters}` |
//! | `repair.md` | the request for a revision | `{verdict}` `{outcome}` |
//! | `example_task.py`, `example_contract.h`, `example_steps.txt`, `example_answer.md` | a task, its contract, its steps, and the answer to it: the first exchange of each conversation. Left out where the answer is empty | |
//! | `scratch_…`, `normalization_…`, `softmax_…`, `reduction_…` | the same four, the example for some tasks in its place | |
//! | `scratch_words.txt`, … | which tasks these are: those whose code or steps have one of these words. The first of these kinds counts | |
//! | `scratch_prefill.md` | `prefill.md` for tasks of that kind, unless it is empty: their kernels have one more parameter | as `prefill.md` |
//! | `example_operator.txt` | what the examples compute, as PyTorch calls it, so that no held-out task has it | |
//!
//! A pipeline replaces some or all of them; one that brings an `example_answer.md` has no example of the other kinds but its
//! own, and one that brings a `prefill.md` no other prefill. Other braces stay as they are, since prompts contain code.
//!
//! A conversation has one example, since small models go on with a series of them inside their answer (docs/log.md, 2026-11-24).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::policy::{Message, Role};
use cuda_agent_kernels::judge::Contract;

/// A file: its name, its own text, the places that it must have, the places that it may have.
struct File {
    name: &'static str,
    text: &'static str,
    needed: &'static [&'static str],
}

/// Whose examples take the place of `example` for some tasks, in the order in which they are tried.
const KINDS: [&str; 4] = ["scratch", "normalization", "softmax", "reduction"];

/// A file of one of these kinds.
macro_rules! of_kind {
    ($name:literal) => {
        File { name: $name, text: include_str!(concat!("../prompts/", $name)), needed: &[] }
    };
}

/// What steps say that are a thread's (`loops.py`).
const OF_A_THREAD: &str = "ach thread has one i < ";

const FILES: [File; 32] = [
    File { name: "system.md", text: include_str!("../prompts/system.md"), needed: &[] },
    File { name: "task.md", text: include_str!("../prompts/task.md"), needed: &["code", "contract"] },
    File { name: "steps.md", text: include_str!("../prompts/steps.md"), needed: &["lines"] },
    File { name: "loops.md", text: include_str!("../prompts/loops.md"), needed: &["lines"] },
    File { name: "prefill.md", text: include_str!("../prompts/prefill.md"), needed: &[] },
    File { name: "repair.md", text: include_str!("../prompts/repair.md"), needed: &["verdict"] },
    File { name: "example_task.py", text: include_str!("../prompts/example_task.py"), needed: &[] },
    File { name: "example_contract.h", text: include_str!("../prompts/example_contract.h"), needed: &[] },
    File { name: "example_steps.txt", text: include_str!("../prompts/example_steps.txt"), needed: &[] },
    File { name: "example_answer.md", text: include_str!("../prompts/example_answer.md"), needed: &[] },
    File { name: "example_operator.txt", text: include_str!("../prompts/example_operator.txt"), needed: &[] },
    of_kind!("scratch_task.py"),
    of_kind!("scratch_contract.h"),
    of_kind!("scratch_steps.txt"),
    of_kind!("scratch_answer.md"),
    of_kind!("scratch_words.txt"),
    of_kind!("scratch_prefill.md"),
    of_kind!("normalization_task.py"),
    of_kind!("normalization_contract.h"),
    of_kind!("normalization_steps.txt"),
    of_kind!("normalization_answer.md"),
    of_kind!("normalization_words.txt"),
    of_kind!("softmax_task.py"),
    of_kind!("softmax_contract.h"),
    of_kind!("softmax_steps.txt"),
    of_kind!("softmax_answer.md"),
    of_kind!("softmax_words.txt"),
    of_kind!("reduction_task.py"),
    of_kind!("reduction_contract.h"),
    of_kind!("reduction_steps.txt"),
    of_kind!("reduction_answer.md"),
    of_kind!("reduction_words.txt"),
];

/// A request for a candidate and a correct answer to it, shown as an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// `task.md`, filled in.
    pub request: String,
    /// The whole answer, its code block included.
    pub answer: String,
}

/// The prompts of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompts {
    files: BTreeMap<&'static str, String>,
}

/// Why a folder of prompts can't be used.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// It can't be read.
    #[error("{0}: {1}")]
    Unreadable(String, std::io::Error),
    /// The model would not be told what to do.
    #[error("the prompt {file} has no {{{place}}}")]
    NoPlace {
        /// The file.
        file: &'static str,
        /// What it lacks.
        place: &'static str,
    },
    /// A misspelt file would be ignored without a word.
    #[error("there is no prompt called {0}: they are {list}", list = FILES.map(|file| file.name).join(", "))]
    Unknown(String),
}

impl Prompts {
    /// This crate's own.
    pub fn own() -> Self {
        Self { files: FILES.iter().map(|file| (file.name, file.text.trim().to_owned())).collect() }
    }

    /// This crate's own, with those of a folder in their places.
    pub fn with(folder: &Path) -> Result<Self, PromptError> {
        let unreadable = |path: &Path, error| PromptError::Unreadable(path.display().to_string(), error);
        let mut prompts = Self::own();
        if folder.join("example_answer.md").exists() {
            for kind in KINDS {
                prompts.file_mut(&format!("{kind}_answer.md")).clear();
            }
        }
        if folder.join("prefill.md").exists() {
            prompts.file_mut("scratch_prefill.md").clear();
        }
        for entry in std::fs::read_dir(folder).map_err(|error| unreadable(folder, error))? {
            let path = entry.map_err(|error| unreadable(folder, error))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == "README.md" || name.starts_with('.') {
                continue;
            }
            let file = FILES.iter().find(|file| file.name == name).ok_or(PromptError::Unknown(name))?;
            let text = std::fs::read_to_string(&path).map_err(|error| unreadable(&path, error))?;
            prompts.files.insert(file.name, text.trim().to_owned());
        }
        for file in &FILES {
            let lacks = |place: &&&str| !prompts.files[file.name].contains(&format!("{{{place}}}"));
            if let Some(place) = file.needed.iter().find(lacks) {
                return Err(PromptError::NoPlace { file: file.name, place });
            }
        }
        Ok(prompts)
    }

    /// Digest of all files: `H("cuda-agent prompts v1", JSON of {name: text})`.
    pub fn digest(&self) -> String {
        let text = serde_json::to_string(&self.files).expect("plain data");
        let digest = blake3::derive_key("cuda-agent prompts v1", text.as_bytes());
        blake3::Hash::from_bytes(digest).to_hex().to_string()
    }

    fn file_mut(&mut self, name: &str) -> &mut String {
        self.files.get_mut(name).expect("every file has a text")
    }

    /// The kinds that a task is of, the first one first.
    fn kinds<'a>(&'a self, code: &'a str, steps: &'a str) -> impl Iterator<Item = &'static str> + 'a {
        let words = |text| str::split(text, |c: char| !c.is_alphanumeric() && c != '_');
        let has: BTreeSet<&str> = words(code).chain(words(steps)).collect();
        KINDS.into_iter().filter(move |kind| {
            let words = &self.files[format!("{kind}_words.txt").as_str()];
            words.split_whitespace().any(|word| has.contains(word))
        })
    }

    /// The kind of example that a task gets; none where its answer is empty.
    fn example(&self, code: &str, steps: &str) -> Option<&'static str> {
        self.kinds(code, steps).chain(["example"]).find(|kind| !self.answer(kind).is_empty())
    }

    fn answer(&self, kind: &str) -> &str {
        &self.files[format!("{kind}_answer.md").as_str()]
    }

    /// The conversation up to the request for a candidate, with the example of the task's kind.
    pub fn opening(&self, code: &str, contract: &Contract) -> Vec<Message> {
        let exchange = self.example(code, &contract.steps).map(|kind| {
            let header = self.files[format!("{kind}_contract.h").as_str()].clone();
            let steps = self.files[format!("{kind}_steps.txt").as_str()].clone();
            let example = Contract { header, parameters: String::new(), steps };
            let request = self.fill("task.md", &self.files[format!("{kind}_task.py").as_str()], &example);
            Exchange { request, answer: self.answer(kind).to_owned() }
        });
        self.opening_with(exchange.as_ref(), code, contract)
    }

    /// The same with an example from elsewhere, or with none.
    pub fn opening_with(&self, example: Option<&Exchange>, code: &str, contract: &Contract) -> Vec<Message> {
        let mut messages = Vec::new();
        if !self.files["system.md"].is_empty() {
            messages.push(Message::new(Role::System, &self.files["system.md"]));
        }
        if let Some(Exchange { request, answer }) = example {
            messages.push(Message::new(Role::User, request));
            messages.push(Message::new(Role::Assistant, answer));
        }
        messages.push(Message::new(Role::User, self.fill("task.md", code, contract)));
        messages
    }

    /// How an answer begins.
    pub fn prefill(&self, code: &str, contract: &Contract) -> Option<String> {
        let has_scratch = self.kinds(code, &contract.steps).any(|kind| kind == "scratch");
        // Without the steps a parameter for scratch memory would have no reason.
        let tells_steps = self.files["task.md"].contains("{steps}");
        let own = has_scratch && tells_steps && !self.files["scratch_prefill.md"].is_empty();
        let file = if own { "scratch_prefill.md" } else { "prefill.md" };
        // Servers refuse a prefill that ends in white space.
        let text = self.fill(file, code, contract).trim_end().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The request for a revision.
    pub fn repair(&self, outcome: &str, verdict: &str) -> Message {
        let text = fill(&self.files["repair.md"], &[("outcome", outcome), ("verdict", verdict)]);
        Message::new(Role::User, text)
    }

    fn fill(&self, file: &str, code: &str, contract: &Contract) -> String {
        let steps = match contract.steps.trim() {
            "" => String::new(),
            lines => {
                let file = if lines.contains(OF_A_THREAD) { "loops.md" } else { "steps.md" };
                fill(&self.files[file], &[("lines", lines)])
            }
        };
        let places = [
            ("code", code.trim()),
            ("contract", contract.header.trim()),
            ("parameters", &contract.parameters),
            ("steps", &steps),
        ];
        fill(&self.files[file], &places)
    }
}

/// A text with its places filled in, in one pass: what is filled in is not looked at again.
fn fill(text: &str, places: &[(&str, &str)]) -> String {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        filled.push_str(before);
        let place =
            places.iter().find(|(name, _)| from[1..].strip_prefix(name).is_some_and(|after| after.starts_with('}')));
        match place {
            Some((name, value)) => {
                filled.push_str(value);
                rest = &from[name.len() + 2..];
            }
            None => {
                filled.push('{');
                rest = &from[1..];
            }
        }
    }
    filled + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contract() -> Contract {
        let steps = "out[i] = x[i] + 1.0f;  // i < 8".into();
        Contract { header: "namespace task {\n}\n".into(), parameters: "const float* x, float* out".into(), steps }
    }

    #[test]
    fn places_are_filled_and_other_braces_stay() {
        let filled = fill("{a} {b} {c} {{a}} {", &[("a", "{b}"), ("b", "2")]);
        assert_eq!(filled, "{b} 2 {c} {{b}} {");
    }

    #[test]
    fn an_opening_has_the_example_before_the_task() {
        let messages = Prompts::own().opening("class Model: pass", &contract());
        let roles: Vec<Role> = messages.iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::User]);
        assert!(
            messages[3].content.contains("class Model: pass") && messages[3].content.contains("namespace task {\n}")
        );
        insta::assert_snapshot!(
            messages
                .iter()
                .map(|message| format!("[{}]\n{}\n", message.role.word(), message.content))
                .collect::<String>()
        );
    }

    /// The form that is shown is the form that is asked for.
    #[test]
    fn examples_answer_as_the_prefill_begins() {
        let prompts = Prompts::own();
        for kind in KINDS.into_iter().chain(["example"]) {
            let (task, header) = (
                &prompts.files[format!("{kind}_task.py").as_str()],
                &prompts.files[format!("{kind}_contract.h").as_str()],
            );
            let parameters = header.lines().find_map(|line| line.strip_prefix("#define TASK_PARAMETERS ")).unwrap();
            let steps = prompts.files[format!("{kind}_steps.txt").as_str()].clone();
            let contract = Contract { header: header.clone(), parameters: parameters.to_owned(), steps };
            let prefill = prompts.prefill("", &contract).unwrap();
            let answer = prompts.answer(kind);
            assert!(answer.starts_with(&prefill), "{kind}: {prefill}");
            assert!(crate::answer::candidate(answer).is_some(), "{kind}");
            assert_eq!(prompts.example(task, &contract.steps), Some(kind), "an example is of its own kind");
        }
    }

    /// `ops/split` keeps held-out tasks free of what an example computes.
    #[test]
    fn what_examples_compute_is_listed() {
        let prompts = Prompts::own();
        let listed: Vec<String> = prompts.files["example_operator.txt"].split_whitespace().map(plain).collect();
        for kind in KINDS.into_iter().chain(["example"]) {
            let task = &prompts.files[format!("{kind}_task.py").as_str()];
            let words = task.split("nn.").chain(task.split("F.")).chain(task.split("torch.")).skip(1);
            let names = words.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next());
            let operators = names.filter(|name| !["Module", "nn", "functional", "randn", "import", ""].contains(name));
            for operator in operators.map(plain) {
                assert!(listed.contains(&operator), "{kind}: {operator} is not in {listed:?}");
            }
        }
    }

    fn plain(name: &str) -> String {
        name.to_lowercase().replace('_', "").trim_end_matches("2d").to_owned()
    }

    #[test]
    fn a_task_gets_the_example_of_its_kind() {
        let kind = |code: &str| Prompts::own().example(code, "");
        assert_eq!(kind("return torch.sum(x, dim=1)"), Some("reduction"));
        assert_eq!(kind("x = torch.sum(x, dim=1)\nreturn F.log_softmax(x, dim=1)"), Some("softmax"));
        assert_eq!(kind("self.norm = nn.RMSNorm(4)\nself.softmax = nn.Softmax(dim=1)"), Some("normalization"));
        assert_eq!(kind("return torch.abs(summary)"), Some("example"));
        let with_steps = |steps: &str| Prompts::own().example("return torch.max(x, 1)[0]", steps);
        assert_eq!(with_steps("out[i] = x[i];  // i < 8"), Some("example"));
        assert_eq!(with_steps("Each thread has one i < 8."), Some("reduction"));
        assert_eq!(with_steps("TASK_SCRATCH(8 * sizeof(float));"), Some("scratch"));
    }

    #[test]
    fn kernels_with_scratch_memory_begin_with_one_more_parameter() {
        let prefill = |prompts: &Prompts| {
            let steps = "TASK_SCRATCH(8 * sizeof(float));".to_owned();
            prompts.prefill("", &Contract { steps, ..contract() })
        };
        assert!(prefill(&Prompts::own()).unwrap().ends_with("kernel1(const float* x, float* out, void* scratch) {"));
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("prefill.md"), "Mine, {parameters}").unwrap();
        assert_eq!(prefill(&Prompts::with(folder.path()).unwrap()).unwrap(), "Mine, const float* x, float* out");
        std::fs::remove_file(folder.path().join("prefill.md")).unwrap();
        std::fs::write(folder.path().join("task.md"), "{code} {contract}").unwrap();
        assert!(
            prefill(&Prompts::with(folder.path()).unwrap()).unwrap().ends_with("compute(const float* x, float* out) {")
        );
    }

    #[test]
    fn steps_with_loops_have_words_of_their_own() {
        let request = |steps: &str| {
            let contract = Contract { steps: steps.to_owned(), ..contract() };
            Prompts::own().opening("c", &contract).pop().unwrap().content
        };
        assert!(request("out[i] = x[i];  // i < 8").contains("one i of the last line"));
        assert!(request("Each thread has one i < 8. For each k < 4, j = i * 4 + k.").contains("lines of one thread"));
    }

    #[test]
    fn a_folder_replaces_what_it_has() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("example_answer.md"), "\n").unwrap();
        std::fs::write(folder.path().join("prefill.md"), "").unwrap();
        std::fs::write(folder.path().join("README.md"), "mine").unwrap();
        let prompts = Prompts::with(folder.path()).unwrap();
        assert_eq!(prompts.opening("c", &contract()).len(), 2);
        assert_eq!(prompts.prefill("c", &contract()), None);
        assert_eq!(
            prompts.example("return torch.sum(x, dim=1)", ""),
            None,
            "built-in examples beside one of one's own"
        );
        assert_ne!(prompts.digest(), Prompts::own().digest());
        std::fs::write(folder.path().join("task.md"), "{code}").unwrap();
        assert_eq!(Prompts::with(folder.path()).unwrap_err().to_string(), "the prompt task.md has no {contract}");
        std::fs::write(folder.path().join("sytem.md"), "").unwrap();
        assert!(Prompts::with(folder.path()).unwrap_err().to_string().contains("sytem.md"));
    }

    #[test]
    fn a_repair_tells_the_verdict() {
        let message = Prompts::own().repair("compile_error", "compile error:\n  3:5: expected {code}");
        assert!(message.content.contains("3:5: expected {code}"), "{}", message.content);
    }
}
