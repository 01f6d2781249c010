//! The server over a socket, with a model that says nothing sensible and a tokenizer of bytes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;

use serde_json::{Value, json};

use super::*;
use crate::sampler::Options;
use crate::sampler::tests::byte_model;

/// Starts a server, which lives as long as the tests do.
fn start(token: Option<&str>) -> SocketAddr {
    let (decoder, own, tokenizer) = byte_model();
    let sampler = Sampler::new(decoder, Some(own), Options { slots: 4, capacity: 64, is_plain: false });
    let server = Server::new(sampler, tokenizer, "tiny".into(), token.map(str::to_owned));
    let (ready, address) = mpsc::channel();
    std::thread::spawn(move || {
        server.run(SocketAddr::from(([127, 0, 0, 1], 0)), |address| ready.send(address).unwrap())
    });
    address.recv().unwrap()
}

/// One request on a connection of its own: status and body.
fn call(address: SocketAddr, method: &str, path: &str, headers: &str, body: &Value) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text.split_once("\r\n\r\n").unwrap().1.to_owned())
}

fn post(address: SocketAddr, path: &str, body: Value) -> (u16, Value) {
    let (status, text) = call(address, "POST", path, "", &body);
    (status, serde_json::from_str(&text).unwrap())
}

/// Equal answers, up to the last bits of log-probabilities: those depend on who else is in the batch, that is on when a
/// request arrives.
fn assert_same(one: &Value, other: &Value) {
    match (one, other) {
        (Value::Number(left), Value::Number(right)) if left.is_f64() => {
            let (left, right) = (left.as_f64().unwrap(), right.as_f64().unwrap());
            assert!((left - right).abs() < 1e-4, "{left} and {right}");
        }
        (Value::Array(left), Value::Array(right)) => {
            assert_eq!(left.len(), right.len());
            left.iter().zip(right).for_each(|(left, right)| assert_same(left, right));
        }
        (Value::Object(left), Value::Object(right)) => {
            assert!(left.keys().eq(right.keys()), "{one} and {other}");
            left.values().zip(right.values()).for_each(|(left, right)| assert_same(left, right));
        }
        _ => assert_eq!(one, other),
    }
}

#[test]
fn completions_of_text_and_of_ids_are_the_same() {
    let address = start(None);
    let ask = |prompt: Value| {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 9, "seed": 5, "n": 2, "logprobs": 1,
            "return_token_ids": true, "ignore_eos": true});
        let (status, answer) = post(address, "/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let (text, ids) = (ask(json!("ab")), ask(json!([97, 98])));
    assert_same(&text["choices"], &ids["choices"]);
    let choices = text["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_ne!(choices[0]["token_ids"], choices[1]["token_ids"]);
    for choice in choices {
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["prompt_token_ids"], json!([97, 98]));
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), 9);
        assert!(choice["logprobs"]["token_logprobs"][3].as_f64().unwrap() < 0.0);
    }
    assert_eq!(text["usage"], json!({"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}));
    let both = ask(json!(["ab", [97]]));
    assert_eq!(both["choices"].as_array().unwrap().len(), 4);
    assert_same(&both["choices"][1], &text["choices"][1]);
    assert_eq!(both["choices"][3]["prompt_token_ids"], json!([97]));
}

#[test]
fn chats_are_rendered_and_streams_say_the_same() {
    let address = start(None);
    let body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 12,
        "seed": 3, "return_token_ids": true, "logprobs": true});
    let (status, whole) = post(address, "/v1/chat/completions", body.clone());
    assert_eq!(status, 200, "{whole}");
    let prompt: Vec<u8> =
        whole["prompt_token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap().min(255) as u8).collect();
    assert_eq!(prompt, b"\xffuser\nhi\xff\n\xffassistant\n");
    let choice = &whole["choices"][0];
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), choice["token_ids"].as_array().unwrap().len());

    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["logprobs"] = json!(false);
    streamed["stream_options"] = json!({"include_usage": true});
    let (status, text) = call(address, "POST", "/v1/chat/completions", "", &streamed);
    assert_eq!(status, 200);
    let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (done, pieces) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    let pieces: Vec<Value> = pieces.iter().map(|piece| serde_json::from_str(piece).unwrap()).collect();
    let content: String = pieces.iter().filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, choice["message"]["content"].as_str().unwrap());
    let (usage, pieces) = pieces.split_last().unwrap();
    assert_eq!(usage["usage"], whole["usage"]);
    assert_eq!(pieces.last().unwrap()["choices"][0]["token_ids"], choice["token_ids"]);
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let address = start(None);
    let ask = |stop: Value| {
        let body = json!({"prompt": "q", "max_tokens": 40, "seed": 1, "stop": stop, "ignore_eos": true});
        post(address, "/v1/completions", body).1["choices"][0].clone()
    };
    let whole = ask(Value::Null)["text"].as_str().unwrap().to_owned();
    let stop: String = whole.chars().skip(5).take(2).collect();
    let cut = ask(json!([stop]));
    assert_eq!(cut["finish_reason"], "stop");
    assert_eq!(cut["text"].as_str().unwrap(), whole.split(&stop).next().unwrap());
}

#[test]
fn what_is_not_served_is_refused_with_its_name() {
    let address = start(None);
    let message = |path: &str, body: Value| {
        let (status, answer) = post(address, path, body);
        format!("{status} {}", answer["error"]["message"].as_str().unwrap())
    };
    let with = |name: &str, value: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 2});
        body[name] = value;
        message("/v1/completions", body)
    };
    insta::assert_snapshot!(
        [
            with("model", json!("gpt")),
            with("prompt", json!({})),
            with("prompt", json!("x".repeat(64))),
            with("prompt", json!([999])),
            with("temperature", json!(-1)),
            with("temperature", json!("hot")),
            with("frequency_penalty", json!(0.5)),
            with("logprobs", json!(5)),
            with("n", json!(100_000)),
            with("stop", json!(3)),
            with("max_tokens", json!(0)),
            message(
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
            ),
            message("/v1/embeddings", json!({})),
        ]
        .join("\n")
    );
}

#[test]
fn a_token_is_borne_or_nothing_is_answered() {
    let address = start(Some("secret"));
    let models = |headers: &str| call(address, "GET", "/v1/models", headers, &Value::Null).0;
    assert_eq!(models(""), 401);
    assert_eq!(models("Authorization: Bearer secre\r\n"), 401);
    assert_eq!(models("Authorization: Bearer secret2\r\n"), 401);
    assert_eq!(models("Authorization: Bearer secret\r\n"), 200);
    assert_eq!(call(address, "GET", "/health", "", &Value::Null).0, 200);
    let error = main(&["m", "--host", "0.0.0.0"].map(str::to_owned)).unwrap_err();
    assert_eq!(error.message, "--host 0.0.0.0 can be reached by others, and no token is set");
}
