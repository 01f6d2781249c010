//! Prompts: Markdown files with places to fill in, and the conversation that they make.
//!
//! | file | is | places |
//! |---|---|---|
//! | `system.md` | the system's message; left out where it is empty | |
//! | `task.md` | the request for a candidate | `{code}` `{contract}` `{parameters}` |
//! | `prefill.md` | how the assistant's answer begins; empty for no prefill | `{code}` `{contract}` `{parameters}` |
//! | `repair.md` | the request for a revision | `{verdict}` `{outcome}` |
//! | `example_task.py`, `example_contract.h`, `example_answer.md` | a task, its contract, and the answer to it: the first exchange of each conversation. Left out where the answer is empty | |
//! | `example_operator.txt` | what the example computes, as PyTorch calls it, so that no held-out task has it | |
//!
//! A pipeline replaces some or all of them. Other braces stay as they are, since prompts contain code.

use std::collections::BTreeMap;
use std::path::Path;

use crate::policy::{Message, Role};
use cuda_agent_kernels::judge::Contract;

/// A file: its name, its own text, the places that it must have, the places that it may have.
struct File {
    name: &'static str,
    text: &'static str,
    needed: &'static [&'static str],
}

const FILES: [File; 8] = [
    File { name: "system.md", text: include_str!("../prompts/system.md"), needed: &[] },
    File { name: "task.md", text: include_str!("../prompts/task.md"), needed: &["code", "contract"] },
    File { name: "prefill.md", text: include_str!("../prompts/prefill.md"), needed: &[] },
    File { name: "repair.md", text: include_str!("../prompts/repair.md"), needed: &["verdict"] },
    File { name: "example_task.py", text: include_str!("../prompts/example_task.py"), needed: &[] },
    File { name: "example_contract.h", text: include_str!("../prompts/example_contract.h"), needed: &[] },
    File { name: "example_answer.md", text: include_str!("../prompts/example_answer.md"), needed: &[] },
    File { name: "example_operator.txt", text: include_str!("../prompts/example_operator.txt"), needed: &[] },
];

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

    /// What the example computes; empty where there is no example.
    pub fn example_operator(&self) -> &str {
        if self.files["example_answer.md"].is_empty() { "" } else { &self.files["example_operator.txt"] }
    }

    /// The conversation up to the request for a candidate.
    pub fn opening(&self, code: &str, contract: &Contract) -> Vec<Message> {
        let mut messages = Vec::new();
        if !self.files["system.md"].is_empty() {
            messages.push(Message::new(Role::System, &self.files["system.md"]));
        }
        if !self.files["example_answer.md"].is_empty() {
            let example = Contract { header: self.files["example_contract.h"].clone(), parameters: String::new() };
            let request = self.fill("task.md", &self.files["example_task.py"], &example);
            messages.push(Message::new(Role::User, request));
            messages.push(Message::new(Role::Assistant, &self.files["example_answer.md"]));
        }
        messages.push(Message::new(Role::User, self.fill("task.md", code, contract)));
        messages
    }

    /// How an answer begins.
    pub fn prefill(&self, code: &str, contract: &Contract) -> Option<String> {
        // Servers refuse a prefill that ends in white space.
        let text = self.fill("prefill.md", code, contract).trim_end().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// The request for a revision.
    pub fn repair(&self, outcome: &str, verdict: &str) -> Message {
        let text = fill(&self.files["repair.md"], &[("outcome", outcome), ("verdict", verdict)]);
        Message::new(Role::User, text)
    }

    fn fill(&self, file: &str, code: &str, contract: &Contract) -> String {
        let places =
            [("code", code.trim()), ("contract", contract.header.trim()), ("parameters", &contract.parameters)];
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
        Contract { header: "namespace task {\n}\n".into(), parameters: "const float* x, float* out".into() }
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
    fn the_example_answers_as_the_prefill_begins() {
        let prompts = Prompts::own();
        let example = &prompts.files["example_contract.h"];
        let parameters = example.lines().find_map(|line| line.strip_prefix("#define TASK_PARAMETERS ")).unwrap();
        let contract = Contract { header: example.clone(), parameters: parameters.to_owned() };
        let prefill = prompts.prefill("", &contract).unwrap();
        assert!(prompts.files["example_answer.md"].starts_with(&prefill), "{prefill}");
        assert!(crate::answer::candidate(&prompts.files["example_answer.md"]).is_some());
        assert!(prompts.files["example_task.py"].contains(prompts.example_operator()));
    }

    #[test]
    fn a_folder_replaces_what_it_has() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("example_answer.md"), "\n").unwrap();
        std::fs::write(folder.path().join("prefill.md"), "").unwrap();
        std::fs::write(folder.path().join("README.md"), "mine").unwrap();
        let prompts = Prompts::with(folder.path()).unwrap();
        assert_eq!(prompts.opening("c", &contract()).len(), 2);
        assert_eq!((prompts.prefill("c", &contract()), prompts.example_operator()), (None, ""));
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
