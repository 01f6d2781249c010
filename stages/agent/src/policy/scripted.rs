//! The policy that needs no model: it reads the task's contract in the prompt, and writes what a beginner would.
//!
//! A task with one float tensor in, one float tensor of the same size out, and a single elementwise operator of
//! [`OPERATORS`] in its `forward` gets a kernel made of the contract's own names. What it can't read gets a copy of its first
//! input, which is wrong. So that rewards are spread, a first answer forgets the tail of the tensor for one sample in three,
//! drawn from the request's key; a later turn does not. The same request always gets the same answer.
//!
//! Its tokens are bytes, its chat template is [`render`], and since its answers are certain, their log-probabilities
//! are 0: pipelines with it exercise all that is by token.

use std::time::Instant;

use super::{Completion, Finish, Identity, Message, Policy, PolicyError, Request, Role, Tokens};

/// The token that ends a turn.
const END: u32 = 256;
/// The token that begins one; the role's name follows.
const BEGIN: u32 = 257;

/// Operators by the name that PyTorch calls them by, and what they are of `v` in CUDA.
const OPERATORS: [(&str, &str); 14] = [
    ("abs", "fabsf(v)"),
    ("cos", "cosf(v)"),
    ("exp", "expf(v)"),
    ("hardtanh", "fminf(fmaxf(v, -1.0f), 1.0f)"),
    ("neg", "-v"),
    ("relu", "fmaxf(v, 0.0f)"),
    ("relu6", "fminf(fmaxf(v, 0.0f), 6.0f)"),
    ("sigmoid", "1.0f / (1.0f + expf(-v))"),
    ("silu", "v / (1.0f + expf(-v))"),
    ("sin", "sinf(v)"),
    ("softsign", "v / (1.0f + fabsf(v))"),
    ("square", "v * v"),
    ("tanh", "tanhf(v)"),
    ("tanhshrink", "v - tanhf(v)"),
];

/// The embedded policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scripted;

/// What the prompt says of a task.
#[derive(Debug, Default, PartialEq, Eq)]
struct Contract<'a> {
    parameters: &'a str,
    /// Name and elements of each tensor, in order.
    tensors: Vec<(&'a str, &'a str)>,
    /// Of the forward, if it is one of ours.
    expression: Option<&'static str>,
}

impl<'a> Contract<'a> {
    /// Reads the last contract of a text, which is that of the task: an example comes before.
    fn read(text: &'a str) -> Self {
        let after = |prefix: &'static str| move |line: &'a str| line.trim().strip_prefix(prefix);
        let start = text.rfind("namespace task {").unwrap_or(text.len());
        let parameters = text[start..].lines().find_map(after("#define TASK_PARAMETERS ")).unwrap_or_default();
        let sizes = text[start..].lines().filter_map(after("constexpr long long "));
        let tensors = sizes.filter_map(|line| {
            let (name, size) = line.strip_suffix(';')?.split_once(" = ")?;
            Some((name.strip_suffix("_size")?, size))
        });
        Self { parameters, tensors: tensors.collect(), expression: expression(&text[..start]) }
    }

    fn is_elementwise(&self) -> bool {
        matches!(self.tensors[..], [(_, given), (_, taken)] if given == taken)
            && self.parameters.split(", ").all(|parameter| parameter.trim_start_matches("const ").starts_with("float*"))
    }
}

/// The operator in the last `return` of a forward that calls one function of one argument: `return torch.relu(x)`.
fn expression(code: &str) -> Option<&'static str> {
    let forward = &code[code.rfind("def forward(")?..];
    let returned = forward.lines().find_map(|line| line.trim().strip_prefix("return "))?;
    let (function, argument) = returned.trim().strip_suffix(')')?.split_once('(')?;
    if !argument.chars().all(|letter| letter.is_alphanumeric() || letter == '_') {
        return None;
    }
    let name = function.rsplit('.').next()?;
    OPERATORS.iter().find(|(operator, _)| *operator == name).map(|(_, expression)| *expression)
}

/// A kernel of the contract. `limit` is how many elements it writes.
fn kernel(contract: &Contract) -> impl Fn(&str) -> String {
    let (input, output) = match contract.tensors[..] {
        [(input, _), .., (output, _)] => (input.to_owned(), output.to_owned()),
        _ => ("x".to_owned(), "out".to_owned()),
    };
    let expression = contract.expression.filter(|_| contract.is_elementwise()).unwrap_or("v");
    let parameters = contract.parameters.to_owned();
    move |limit| {
        let limit = format!("task::{output}_size{limit}");
        format!(
            "#include \"task.h\"\n\nextern \"C\" __global__ void compute({parameters}) {{\n    long long i = blockIdx.x * \
             (long long)blockDim.x + threadIdx.x;\n    if (i < {limit}) {{\n        float v = {input}[i];\n        {output}[i] = \
             {expression};\n    }}\n}}\n\nTASK_LAUNCH(compute, (task::{output}_size + 255) / 256, 256);\n"
        )
    }
}

/// The answer to a conversation, and a prefill that it goes on from.
fn answer(request: &Request) -> String {
    let (messages, prefill) = match request.messages {
        [messages @ .., Message { role: Role::Assistant, content }] => (messages, content.as_str()),
        messages => (messages, ""),
    };
    let asked = messages.iter().rfind(|message| message.content.contains("namespace task {"));
    let contract = Contract::read(asked.map_or("", |message| &message.content));
    let forgets = request.key.turn == 0 && request.sampling.temperature > 0.0 && request.key.bits().is_multiple_of(3);
    let written = format!("```cuda\n{}```", kernel(&contract)(if forgets { " / 256 * 255" } else { "" }));
    match written.strip_prefix(prefill) {
        Some(rest) => rest.to_owned(),
        // Of a prefill that it does not know it goes on with what is left after the signature.
        None => written.split_once(") {\n").map_or(written.clone(), |(_, rest)| format!("\n{rest}")),
    }
}

/// Tokens of messages: BEGIN, the role's name, a line feed, the text, END. A last message of the assistant stays open,
/// and after any other it begins to speak.
fn render(messages: &[Message]) -> Vec<u32> {
    let open = messages.last().is_some_and(|message| message.role == Role::Assistant);
    let mut ids = Vec::new();
    for message in messages {
        ids.push(BEGIN);
        ids.extend(bytes(message.role.word()).chain(bytes("\n")).chain(bytes(&message.content)));
        ids.push(END);
    }
    if open {
        ids.pop();
    } else {
        ids.push(BEGIN);
        ids.extend(bytes("assistant\n"));
    }
    ids
}

fn bytes(text: &str) -> impl Iterator<Item = u32> {
    text.bytes().map(u32::from)
}

fn prompt(request: &Request) -> Vec<u32> {
    let Some(prefix) = request.prefix else { return render(request.messages) };
    let end = (prefix.ids.last() != Some(&END)).then_some(END);
    let rest = render(&request.messages[prefix.messages..]);
    prefix.ids.iter().copied().chain(end).chain(rest).collect()
}

impl Policy for Scripted {
    fn identity(&self) -> Identity {
        Identity { model: "scripted".to_owned(), digest: None }
    }

    fn width(&self) -> usize {
        64
    }

    fn complete(&self, request: &Request) -> Result<Completion, PolicyError> {
        let started = Instant::now();
        let prompt_ids = prompt(request);
        let mut text = answer(request);
        let stop = request.sampling.stop.iter().filter_map(|stop| text.find(stop.as_str()).map(|at| (at, stop.len())));
        let stop = stop.min();
        let mut ids: Vec<u32> = match stop {
            Some((at, length)) => bytes(&text[..at + length]).collect(),
            None => bytes(&text).chain([END]).collect(),
        };
        let most = request.sampling.max_tokens as usize;
        let finish = if ids.len() > most { Finish::Length } else { Finish::Stop };
        ids.truncate(most);
        text.truncate(stop.map_or(text.len(), |(at, _)| at));
        text.truncate(text.floor_char_boundary(most));
        Ok(Completion {
            text,
            finish,
            prompt_tokens: Some(prompt_ids.len() as u64),
            completion_tokens: Some(ids.len() as u64),
            tokens: Some(Tokens { prompt_ids, log_probs: vec![0.0; ids.len()], ids }),
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Key, Sampling};
    use super::*;

    const TASK: &str = "class Model(nn.Module):\n    def forward(self, scores):\n        return torch.tanh(scores)\n\n\
        namespace task {\n// scores: float [64, 32], argument 1, read\nconstexpr long long scores_size = 2048;\n\
        // out: float [64, 32], argument 2, written\nconstexpr long long out_size = 2048;\n}\n\
        #define TASK_PARAMETERS const float* scores, float* out\n";

    fn complete(task: &str, prefill: &str, sample: u32, turn: u32) -> String {
        let mut messages = vec![Message::new(Role::User, task)];
        if !prefill.is_empty() {
            messages.push(Message::new(Role::Assistant, prefill));
        }
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: None, max_tokens: 4096, stop: Vec::new() };
        let key = Key { seed: 0, task: "t".into(), sample, turn };
        let request = Request { messages: &messages, prefix: None, sampling: &sampling, key: &key };
        Scripted.complete(&request).unwrap().text
    }

    #[test]
    fn a_kernel_is_made_of_the_contracts_names() {
        let text = complete(TASK, "", 0, 1);
        assert!(text.contains("void compute(const float* scores, float* out)"), "{text}");
        assert!(text.contains("float v = scores[i];\n        out[i] = tanhf(v);"), "{text}");
    }

    #[test]
    fn the_last_contract_is_the_tasks() {
        let example = TASK.replace("scores", "example").replace("tanh", "relu");
        let text = complete(&format!("{example}{TASK}"), "", 0, 1);
        assert!(text.contains("tanhf") && !text.contains("example"), "{text}");
    }

    #[test]
    fn a_prefill_is_gone_on_from() {
        let prefill =
            "```cuda\n#include \"task.h\"\n\nextern \"C\" __global__ void compute(const float* scores, float* out) {";
        let (whole, rest) = (complete(TASK, "", 0, 1), complete(TASK, prefill, 0, 1));
        assert_eq!(whole, format!("{prefill}{rest}"));
        let other = complete(TASK, "```cuda\n// mine\nvoid mine(const float* scores, float* out) {", 0, 1);
        assert!(other.starts_with("\n    long long i"), "{other}");
    }

    #[test]
    fn what_it_cannot_read_is_copied() {
        for (from, to) in [("tanh(scores)", "softmax(scores, dim=1)"), ("out_size = 2048", "out_size = 64")] {
            let text = complete(&TASK.replace(from, to), "", 0, 1);
            assert!(text.contains("out[i] = v;"), "{text}");
        }
    }

    #[test]
    fn some_first_answers_forget_the_tail() {
        let forgetful = (0..60).filter(|sample| complete(TASK, "", *sample, 0).contains("/ 256 * 255")).count();
        assert!((10..=30).contains(&forgetful), "{forgetful} of 60");
        assert!((0..60).all(|sample| !complete(TASK, "", sample, 1).contains("/ 256 * 255")));
    }
}
