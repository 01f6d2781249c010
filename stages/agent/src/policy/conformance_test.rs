//! What holds of every policy, run against each of them: the scripted one, the three formats against a server that speaks
//! them, and a sampler against a child that does. Server and child answer with the scripted policy, so all five must
//! agree with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use cuda_agent_builtin::train_program;

use super::anthropic::Messages;
use super::child::{FromSampler, Ready, SampleAnswer, SampleError, ToSampler};
use super::endpoint::Endpoint;
use super::http::Client;
use super::openai::{ByTokens, Chat};
use super::sampler::Sampler;
use super::scripted::Scripted;
use super::served::{self, Served, Settings};
use super::{
    Completion, Finish, Key, Message, Policy, PolicyError, Prefix, Request, Role, Sampling, Tokens, anthropic, openai,
};

const TASK: &str = "class Model(nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n\nnamespace task {\n\
    constexpr long long x_size = 2048;\nconstexpr long long out_size = 2048;\n}\n\
    #define TASK_PARAMETERS const float* x, float* out\n";
const PREFILL: &str = "```cuda\n#include \"task.h\"";

fn sampling() -> Sampling {
    Sampling { temperature: 1.0, top_p: 1.0, top_k: None, max_tokens: 2048, stop: Vec::new() }
}

fn key(turn: u32) -> Key {
    Key { seed: 7, task: "t".into(), sample: 1, turn }
}

fn opening() -> Vec<Message> {
    vec![Message::new(Role::System, "You write kernels."), Message::new(Role::User, TASK)]
}

fn ask(policy: &dyn Policy, messages: &[Message], prefix: Option<&Prefix>, sampling: &Sampling) -> Completion {
    policy.complete(&Request { messages, prefix, sampling, key: &key(1) }).unwrap()
}

fn with(mut messages: Vec<Message>, role: Role, text: &str) -> Vec<Message> {
    messages.push(Message::new(role, text));
    messages
}

/// What every policy keeps to. `knows_tokens` is whether it says them.
fn conforms(name: &str, policy: &dyn Policy, knows_tokens: bool) {
    assert!(!policy.identity().model.is_empty() && policy.width() > 0, "{name}");
    let answer = ask(policy, &opening(), None, &sampling());
    assert!(answer.text.starts_with("```cuda") && answer.finish == Finish::Stop, "{name}: {answer:?}");
    assert_eq!(answer.tokens.is_some(), knows_tokens, "{name}");
    assert!(answer.completion_tokens.is_some_and(|count| count > 0) && answer.seconds >= 0.0, "{name}");
    let again = ask(policy, &opening(), None, &sampling());
    assert_eq!((&again.text, &again.tokens), (&answer.text, &answer.tokens), "{name}: a key gives one answer");
    let begun = ask(policy, &with(opening(), Role::Assistant, PREFILL), None, &sampling());
    assert_eq!(format!("{PREFILL}{}", begun.text), answer.text, "{name}: a prefill is not repeated");
    let short = ask(policy, &opening(), None, &Sampling { max_tokens: 9, ..sampling() });
    assert_eq!((short.text.as_str(), short.finish), ("```cuda\n#", Finish::Length), "{name}");
    let stopped = ask(policy, &opening(), None, &Sampling { stop: vec!["\n\n".into()], ..sampling() });
    assert_eq!(
        (stopped.text.as_str(), stopped.finish),
        (PREFILL, Finish::Stop),
        "{name}: a stop string ends it, unseen"
    );
    many_at_once(name, policy, &answer);
    if knows_tokens {
        tokens_go_on(name, policy, &stopped);
    }
}

fn many_at_once(name: &str, policy: &dyn Policy, expected: &Completion) {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(ask(policy, &opening(), None, &sampling()).text, expected.text, "{name}"));
        }
    });
}

/// A turn is appended to the ids of the turn before, which are not touched.
fn tokens_go_on(name: &str, policy: &dyn Policy, stopped: &Completion) {
    for completion in [stopped, &ask(policy, &opening(), None, &sampling())] {
        let tokens = completion.tokens.as_ref().unwrap();
        assert_eq!(tokens.ids.len(), tokens.log_probs.len(), "{name}");
        assert!(tokens.log_probs.iter().all(|log_prob| *log_prob <= 0.0), "{name}");
        let ids = [tokens.prompt_ids.clone(), tokens.ids.clone()].concat();
        // The text of the answer is another than what was sampled: it must not matter.
        let messages = with(opening(), Role::Assistant, "quite another answer");
        let prefix = Prefix { ids: ids.clone(), messages: messages.len() };
        let messages = with(messages, Role::User, "Wrong. Again.");
        let next = ask(policy, &messages, Some(&prefix), &sampling()).tokens.unwrap();
        let asked =
            next.prompt_ids.strip_prefix(ids.as_slice()).unwrap_or_else(|| panic!("{name}: the ids were changed"));
        let ends_turn = asked.first() == Some(&256);
        assert_eq!(ends_turn, ids.last() != Some(&256), "{name}: one token ends a turn");
        let text: String = asked.iter().filter_map(|id| char::from_u32(*id).filter(|_| *id < 256)).collect();
        assert_eq!(text, "user\nWrong. Again.assistant\n", "{name}: what comes between");
    }
}

/// A server that speaks all formats, one thread for each connection. `fault` may answer in its place.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Value>>>,
}

type Fault = fn(usize) -> Option<(u16, &'static str)>;

impl Server {
    fn start(fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let seen = seen.clone();
                std::thread::spawn(move || serve(stream, &seen, fault));
            }
        });
        Self { address, requests }
    }

    fn client(&self, path: &str, headers: Vec<(&'static str, String)>, retries: u32) -> Client {
        let endpoint =
            Endpoint { base_url: format!("{}{path}", self.address), retries, timeout_s: 20.0, ..Endpoint::default() };
        Client::new(endpoint, headers, Some("sesame".into()))
    }

    fn chat(&self, retries: u32) -> Served<Chat> {
        served(Chat, self.client("/v1", openai::headers(Some("sesame")), retries))
    }
}

fn served<F>(format: F, client: Client) -> Served<F> {
    let body = json!({ "user": "me", "seed": null });
    let settings = Settings { model: "stub".into(), body: body.as_object().unwrap().clone() };
    Served { format, server: served::Server { client, settings } }
}

fn serve(stream: TcpStream, seen: &Mutex<Vec<Value>>, fault: Fault) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let (mut length, mut key) = (0, String::new());
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            let Some((name, value)) = header.trim().split_once(": ") else { break };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "authorization" | "x-api-key" => key = value.to_owned(),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let number = {
            let mut seen = seen.lock().unwrap();
            seen.push(json!({ "path": path, "key": key, "body": body }));
            seen.len()
        };
        let (status, text) = match fault(number) {
            Some((status, text)) => (status, text.to_owned()),
            None => (200, answer(&path, &body).to_string()),
        };
        let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\nretry-after: 0.01\r\n\r\n", text.len());
        if stream.write_all((head + &text).as_bytes()).is_err() {
            return;
        }
    }
}

/// The servers' answers, made by the scripted policy.
fn answer(path: &str, body: &Value) -> Value {
    match path {
        "/v1/chat/completions" => {
            let messages: Vec<Message> = serde_json::from_value(body["messages"].clone()).unwrap();
            let is_begun = messages.last().unwrap().role == Role::Assistant;
            assert_eq!(body["continue_final_message"] == json!(true), is_begun);
            let completion = scripted(&messages, None, body);
            json!({
                "model": "stub", "usage": { "prompt_tokens": 5, "completion_tokens": completion.completion_tokens },
                "choices": [{ "message": { "content": completion.text }, "finish_reason": completion.finish }],
            })
        }
        "/v1/messages" => {
            let system = Message::new(Role::System, body["system"].as_str().unwrap());
            let rest: Vec<Message> = serde_json::from_value(body["messages"].clone()).unwrap();
            let completion = scripted(&[vec![system], rest].concat(), None, body);
            let reason = if completion.finish == Finish::Length { "max_tokens" } else { "end_turn" };
            json!({
                "content": [{ "type": "text", "text": completion.text }], "stop_reason": reason,
                "usage": { "input_tokens": 5, "output_tokens": completion.completion_tokens },
            })
        }
        "/tokenize" => {
            let messages: Vec<Message> = serde_json::from_value(body["messages"].clone()).unwrap();
            json!({ "tokens": scripted(&messages, None, body).tokens.unwrap().prompt_ids })
        }
        "/v1/completions" => {
            let ids: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
            let messages = read(&ids);
            let completion = scripted(&messages, None, body);
            let tokens = completion.tokens.unwrap();
            json!({ "choices": [{
                "text": completion.text, "finish_reason": completion.finish, "token_ids": tokens.ids,
                "logprobs": { "token_logprobs": tokens.log_probs },
            }] })
        }
        other => panic!("nobody calls {other}"),
    }
}

/// The messages that ids of the scripted policy's template stand for.
fn read(ids: &[u32]) -> Vec<Message> {
    let parts = ids.split(|id| *id == 257).skip(1).map(|part| {
        let bytes: Vec<u8> = part.iter().filter(|id| **id < 256).map(|id| *id as u8).collect();
        let text = String::from_utf8(bytes).unwrap();
        let (role, content) = text.split_once('\n').unwrap();
        Message::new(serde_json::from_value(json!(role)).unwrap(), content)
    });
    let mut messages: Vec<Message> = parts.collect();
    messages.pop_if(|last| last.role == Role::Assistant && last.content.is_empty());
    messages
}

fn scripted(messages: &[Message], prefix: Option<&Prefix>, body: &Value) -> Completion {
    let stop = [&body["stop"], &body["stop_sequences"]].into_iter().find(|stop| stop.is_array()).cloned();
    let sampling = Sampling {
        max_tokens: body["max_tokens"].as_u64().unwrap_or(1) as u32,
        stop: stop.map(|stop| serde_json::from_value(stop).unwrap()).unwrap_or_default(),
        ..sampling()
    };
    Scripted.complete(&Request { messages, prefix, sampling: &sampling, key: &key(1) }).unwrap()
}

#[test]
fn the_scripted_policy_conforms() {
    conforms("scripted", &Scripted, true);
}

#[test]
fn chat_completions_conform() {
    let server = Server::start(|_| None);
    conforms("openai", &server.chat(0), false);
    let requests = server.requests.lock().unwrap();
    let sent = &requests[0];
    assert_eq!((&sent["path"], &sent["key"]), (&json!("/v1/chat/completions"), &json!("Bearer sesame")));
    assert_eq!((&sent["body"]["user"], sent["body"].get("seed")), (&json!("me"), None), "`body` has the last word");
    assert_eq!(sent["body"]["model"], "stub");
}

#[test]
fn completions_by_tokens_conform() {
    let server = Server::start(|_| None);
    let client = server.client("/v1", openai::headers(Some("sesame")), 0);
    conforms("openai-tokens", &served(ByTokens, client), true);
}

#[test]
fn messages_conform() {
    let server = Server::start(|_| None);
    let client = server.client("", anthropic::headers(Some("sesame")), 0);
    conforms("anthropic", &served(Messages, client), false);
    assert_eq!(server.requests.lock().unwrap()[0]["key"], "sesame");
}

/// A program that runs this test binary again, as the sampler; `CHILD` says how it behaves.
fn child(folder: &tempfile::TempDir, behaviour: &str) -> Result<Sampler, PolicyError> {
    let program = folder.path().join("sampler");
    let own = std::env::current_exe().unwrap();
    let test = "policy::conformance_test::the_child_itself";
    let own = own.display();
    let script = format!(
        "#!/bin/sh\n[ \"$1 $3 $4\" = 'sample --slots 4' ] || exit 9\nexec 3>&1 >&2\nSAMPLER_CHILD={behaviour} exec '{own}' --exact {test} --nocapture --test-threads=1\n"
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let options = ["--slots".to_owned(), "4".to_owned()];
    Sampler::start(&program, folder.path(), &options, Some("d".into()), None)
}

/// Does nothing as a test; as a child it speaks the protocol on descriptor 3, away from what the test harness prints.
#[test]
fn the_child_itself() {
    let Ok(behaviour) = std::env::var("SAMPLER_CHILD") else { return };
    let mut out = std::fs::OpenOptions::new().write(true).open("/dev/fd/3").unwrap();
    let mut say = move |line: FromSampler| writeln!(out, "{}", serde_json::to_string(&line).unwrap()).unwrap();
    if behaviour == "broken" {
        std::process::exit(3);
    }
    say(FromSampler::Ready(Ready { model: "tiny".into(), width: 4 }));
    for line in std::io::stdin().lines() {
        let ToSampler::Request(request) = serde_json::from_str(&line.unwrap()).unwrap();
        if behaviour == "dies" {
            std::process::exit(3);
        }
        if request.messages[0].content.contains("too long") {
            say(FromSampler::Error(SampleError { id: request.id, message: "4096 tokens and no more".into() }));
            continue;
        }
        let messages = &request.messages;
        let asked =
            Request { messages, prefix: request.prefix.as_ref(), sampling: &request.sampling, key: &request.key };
        let Completion { text, finish, tokens, .. } = Scripted.complete(&asked).unwrap();
        let Tokens { prompt_ids, ids: token_ids, log_probs } = tokens.unwrap();
        let finish_reason = finish;
        say(FromSampler::Answer(SampleAnswer {
            id: request.id,
            text,
            prompt_ids,
            token_ids,
            log_probs,
            finish_reason,
        }));
    }
    std::process::exit(0);
}

#[test]
fn a_sampler_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let sampler = child(&folder, "well").unwrap();
    conforms("local", &sampler, true);
    assert_eq!(sampler.identity().digest.as_deref(), Some("d"));
    let long = [Message::new(Role::User, "too long")];
    let refused = sampler.complete(&Request { messages: &long, prefix: None, sampling: &sampling(), key: &key(0) });
    assert_eq!(refused.unwrap_err(), PolicyError::Refused("4096 tokens and no more".into()));
}

#[test]
fn a_sampler_that_ends_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let error = child(&folder, "broken").err().unwrap();
    assert!(error.to_string().contains("did not load the model: it ended"), "{error}");
    let sampler = child(&folder, "dies").unwrap();
    let messages = opening();
    let ends: Vec<_> = std::thread::scope(|scope| {
        let ask =
            || sampler.complete(&Request { messages: &messages, prefix: None, sampling: &sampling(), key: &key(0) });
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ends.iter().all(|end| matches!(end, Err(PolicyError::Unusable { .. }))), "{ends:?}");
}

#[test]
fn a_program_that_is_not_built_is_told_with_what_builds_it() {
    let folder = tempfile::tempdir().unwrap();
    let find = || train_program::find_in([folder.path().join("none"), folder.path().to_owned()].into_iter());
    assert_eq!(find(), None);
    let PolicyError::Unusable { hint: Some(hint), message, .. } = super::sampler::missing() else { panic!() };
    assert!(hint.contains("make train-tools") && message.contains("cuda-agent-train"), "{message}: {hint}");
    let program = folder.path().join("cuda-agent-train");
    std::fs::write(&program, "").unwrap();
    assert_eq!(find(), Some(program));
}

fn called(fault: Fault, retries: u32) -> (Result<Completion, PolicyError>, usize) {
    let server = Server::start(fault);
    let messages = opening();
    let request = Request { messages: &messages, prefix: None, sampling: &sampling(), key: &key(1) };
    let outcome = server.chat(retries).complete(&request);
    let calls = server.requests.lock().unwrap().len();
    (outcome, calls)
}

#[test]
fn what_passes_is_tried_again() {
    let (outcome, calls) = called(|number| (number < 3).then_some((503, "busy")), 4);
    assert!(outcome.is_ok() && calls == 3, "{outcome:?} after {calls}");
    let (outcome, calls) = called(|_| Some((500, "no")), 2);
    assert_eq!(calls, 3);
    assert!(matches!(&outcome, Err(PolicyError::Failed(why)) if why.contains("after 2 retries")), "{outcome:?}");
    let (outcome, calls) = called(|number| (number == 1).then_some((200, "{\"choices\": []}")), 1);
    assert!(outcome.is_ok() && calls == 2, "what can't be read is tried again");
}

#[test]
fn what_no_call_survives_ends_the_stage() {
    let faults: [(Fault, &str); 3] = [
        (|_| Some((401, "{\"error\": {\"message\": \"bad key sesame\"}}")), "[key]"),
        (|_| Some((404, "{\"detail\": \"no model\"}")), "no model"),
        (|_| Some((400, "{\"error\": {\"message\": \"top_k\"}}")), "top_k"),
    ];
    for (fault, expected) in faults {
        let (outcome, calls) = called(fault, 5);
        let Err(PolicyError::Unusable { message, hint: Some(_), .. }) = outcome else { panic!("{outcome:?}") };
        assert!(message.contains(expected) && !message.contains("sesame") && calls == 1, "{message}");
    }
}

#[test]
fn a_request_that_is_refused_after_others_is_its_own_fault() {
    let server = Server::start(|number| (number == 2).then_some((400, "{\"error\": \"too long\"}")));
    let (policy, messages) = (server.chat(3), opening());
    let ask = || policy.complete(&Request { messages: &messages, prefix: None, sampling: &sampling(), key: &key(1) });
    assert!(ask().is_ok());
    assert!(matches!(ask(), Err(PolicyError::Refused(why)) if why.contains("too long")));
    assert!(ask().is_ok());
}

#[test]
fn three_calls_that_fail_in_a_row_end_the_stage() {
    let server = Server::start(|_| Some((500, "down")));
    let (policy, messages) = (server.chat(0), opening());
    let ask = || policy.complete(&Request { messages: &messages, prefix: None, sampling: &sampling(), key: &key(1) });
    assert!(matches!(ask(), Err(PolicyError::Failed(_))));
    assert!(matches!(ask(), Err(PolicyError::Failed(_))));
    assert!(matches!(ask(), Err(PolicyError::Unusable { .. })));
    assert!(matches!(ask(), Err(PolicyError::Unusable { .. })), "and nothing more is called");
    assert_eq!(server.requests.lock().unwrap().len(), 3);
}

#[test]
fn an_address_without_a_server_ends_the_stage() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let endpoint = Endpoint { base_url: format!("http://{address}/v1"), ..Endpoint::default() };
    let policy = served(Chat, Client::new(endpoint, Vec::new(), None));
    let messages = opening();
    let end = policy.complete(&Request { messages: &messages, prefix: None, sampling: &sampling(), key: &key(1) });
    assert!(
        matches!(&end, Err(PolicyError::Unusable { message, .. }) if message.contains("can't be reached")),
        "{end:?}"
    );
}
