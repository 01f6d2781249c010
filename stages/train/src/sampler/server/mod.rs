//! `cuda-agent-train serve MODEL`: the sampler behind OpenAI's API.
//!
//! | path | |
//! |---|---|
//! | `GET /health` | 200 once the model is loaded |
//! | `GET /v1/models` | the one model |
//! | `POST /v1/completions` | `prompt` as text or ids, or a list of these |
//! | `POST /v1/chat/completions` | `messages` by the model's template |
//!
//! Both take `n`, `stop`, `seed`, `logprobs` (the sampled token's), `stream`, and of vLLM's extensions `top_k`,
//! `return_token_ids`, `ignore_eos`, `stop_token_ids`, for chats `chat_template_kwargs` and `continue_final_message`. What
//! would change an answer and isn't served is refused with its name. With a token set, every request but `/health` must
//! bear it; without one, only loopback addresses are listened on.

mod answer;
mod api;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http_body_util::{BodyExt, Channel, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::TrainError;
use crate::sampler::open::Arguments;
use crate::sampler::server::answer::Head;
use crate::sampler::server::api::{Call, Interface, Refusal};
use crate::sampler::{Handle, Request as SamplerRequest, Sample, Sampler};
use crate::text::Tokenizer;

/// Bytes of a request, at most.
const LARGEST_BODY: usize = 64 << 20;
/// Samples that are waited for at a time, at most: each takes a thread, and those beyond it wait for one.
const WAITING_THREADS: usize = 2048;

/// What the program takes beside [`crate::sampler::open::USAGE`].
pub const USAGE: &str = "\
--host ADDRESS      where to listen (127.0.0.1)
--port N            0 takes a free one, which is printed (8000)
--token-file FILE   its first line must be borne by every request; needed where --host is no loopback address";

/// What is served.
pub struct Server {
    sampler: Sampler,
    tokenizer: Tokenizer,
    model: String,
    token: Option<String>,
    requests: AtomicU64,
    /// Differs between servers, for random numbers of requests without a seed.
    begun: u64,
}

/// The program: serves until it is ended.
pub fn main(arguments: &[String]) -> Result<(), TrainError> {
    let mut arguments = Arguments::parse(arguments)?;
    let mut take = |name: &str| {
        let place = arguments.others.iter().position(|(found, _)| found == name)?;
        Some(arguments.others.remove(place).1)
    };
    let host = take("host").unwrap_or_else(|| "127.0.0.1".into());
    let host: IpAddr = host.parse().map_err(|_| TrainError::new(format!("--host {host}: expected an IP address")))?;
    let port = take("port").unwrap_or_else(|| "8000".into());
    let port: u16 = port.parse().map_err(|_| TrainError::new(format!("--port {port}: expected a port")))?;
    let token = take("token-file").map(PathBuf::from).map(|path| read_token(&path)).transpose()?;
    arguments.expect_no_others()?;
    if token.is_none() && !host.is_loopback() {
        let error = TrainError::new(format!("--host {host} can be reached by others, and no token is set"));
        return Err(error.with_hint("add --token-file FILE, or listen on 127.0.0.1"));
    }
    let (sampler, tokenizer) = arguments.open()?;
    let server = Server::new(sampler, tokenizer, arguments.name(), token);
    server.run(SocketAddr::new(host, port), |address| println!("serving {} on http://{address}/v1", arguments.name()))
}

fn read_token(path: &std::path::Path) -> Result<String, TrainError> {
    let text = std::fs::read_to_string(path).map_err(TrainError::file(path))?;
    let token = text.lines().next().unwrap_or_default().trim();
    if token.is_empty() {
        return Err(TrainError::new(format!("{}: its first line is empty", path.display())));
    }
    Ok(token.to_owned())
}

type Body = Either<Full<Bytes>, Channel<Bytes, Infallible>>;

impl Server {
    /// Serves a sampler. `tokenizer` is that of its model.
    pub fn new(sampler: Sampler, tokenizer: Tokenizer, model: String, token: Option<String>) -> Self {
        let begun = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        Self { sampler, tokenizer, model, token, requests: AtomicU64::new(0), begun }
    }

    /// Listens and serves until the process ends. `ready` gets the address once requests are answered.
    pub fn run(self, address: SocketAddr, ready: impl FnOnce(SocketAddr)) -> Result<(), TrainError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(WAITING_THREADS)
            .enable_all()
            .build()
            .map_err(|error| TrainError::new(format!("no threads for the server: {error}")))?;
        let failed = |error: std::io::Error| TrainError::new(format!("{address}: {error}"));
        let server = Arc::new(self);
        runtime.block_on(async {
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            ready(listener.local_addr().map_err(failed)?);
            loop {
                // A connection that failed before it was accepted is its client's concern.
                let Ok((stream, _)) = listener.accept().await else { continue };
                tokio::spawn(Arc::clone(&server).connection(stream));
            }
        })
    }

    async fn connection(self: Arc<Self>, stream: tokio::net::TcpStream) {
        let service = service_fn(move |request| {
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.respond(request).await) }
        });
        // An error is the end of the connection, which is all that it means here.
        let _ended = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
    }

    async fn respond(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        self.route(request).await.unwrap_or_else(|refusal| {
            let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            json_response(status, &answer::refusal(&refusal))
        })
    }

    async fn route(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let path = request.uri().path().trim_end_matches('/').to_owned();
        if path == "/health" {
            return Ok(json_response(StatusCode::OK, &json!({})));
        }
        self.check_token(&request)?;
        let interface = match (request.method(), path.as_str()) {
            (&Method::GET, "/v1/models") => {
                let model = json!({"id": self.model, "object": "model", "created": 0, "owned_by": "cuda-agent",
                    "max_model_len": self.sampler.options().capacity});
                return Ok(json_response(StatusCode::OK, &json!({"object": "list", "data": [model]})));
            }
            (&Method::POST, "/v1/completions") => Interface::Completions,
            (&Method::POST, "/v1/chat/completions") => Interface::Chat,
            (method, path) => return Err(Refusal::new(404, format!("{method} {path}: nothing is here"))),
        };
        let body = Limited::new(request.into_body(), LARGEST_BODY).collect().await;
        let body = body.map_err(|error| Refusal::new(400, format!("the request's body: {error}")))?.to_bytes();
        let call = Call::read(interface, &body, &self.model, &self.sampler, &self.tokenizer)?;
        if call.stream { Ok(self.stream(call)) } else { self.whole(call).await }
    }

    fn check_token(&self, request: &Request<Incoming>) -> Result<(), Refusal> {
        let Some(token) = &self.token else { return Ok(()) };
        let borne = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        match borne.and_then(|value| value.strip_prefix("Bearer ")) {
            Some(borne) if equal(borne, token) => Ok(()),
            _ => Err(Refusal::new(401, "the request bears no token, or another than this server's")),
        }
    }

    fn head(&self) -> Head {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Head { model: self.model.clone(), number, created }
    }

    /// Submits every sample of a call, in the order of choices.
    fn submit(&self, call: &Call, head: &Head) -> Vec<Handle> {
        let unique = self.begun.wrapping_add(head.number);
        let choices = call.prompts.iter().zip(&call.settings);
        let choices = choices.flat_map(|choice| std::iter::repeat_n(choice, call.count)).enumerate();
        choices
            .map(|(index, (prompt, settings))| {
                let (prompt, settings) = (prompt.clone(), settings.clone());
                self.sampler.submit(SamplerRequest { prompt, key: call.key(index, unique), settings })
            })
            .collect()
    }

    async fn whole(self: Arc<Self>, call: Call) -> Result<Response<Body>, Refusal> {
        let head = self.head();
        let handles = self.submit(&call, &head);
        // Dropped with this future, when the client has gone.
        let client = Arc::new(());
        let waiting = Arc::downgrade(&client);
        let samples = tokio::task::spawn_blocking(move || wait_all(handles, &waiting)).await;
        let samples = samples.map_err(|error| Refusal::new(500, error.to_string()))??;
        drop(client);
        Ok(json_response(StatusCode::OK, &answer::whole(&call, &head, &samples, &self.tokenizer)))
    }

    /// Answers by server-sent events.
    fn stream(self: Arc<Self>, call: Call) -> Response<Body> {
        let head = self.head();
        let handles = self.submit(&call, &head);
        let (mut sender, body) = Channel::new(16);
        let (pieces, mut received) = mpsc::channel(64);
        let shared = Arc::new((call, head));
        for (index, handle) in handles.into_iter().enumerate() {
            let (pieces, shared) = (pieces.clone(), Arc::clone(&shared));
            tokio::task::spawn_blocking(move || send_pieces(&shared.0, &shared.1, index, &handle, &pieces));
        }
        drop(pieces);
        tokio::spawn(async move {
            let mut tokens = 0;
            while let Some((piece, more)) = received.recv().await {
                tokens += more;
                // Where the client has gone, pieces have no receiver any more, and their senders drop their handles.
                if sender.send_data(event(&piece.to_string())).await.is_err() {
                    return;
                }
            }
            let (call, head) = &*shared;
            if call.stream_usage {
                let _gone = sender.send_data(event(&answer::usage_piece(call, head, tokens).to_string())).await;
            }
            let _gone = sender.send_data(event("[DONE]")).await;
        });
        let response = Response::builder().header(header::CONTENT_TYPE, "text/event-stream");
        response.body(Either::Right(body)).expect("a response with a valid header")
    }
}

fn event(data: &str) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

/// Sends the pieces of one choice with the number of tokens that ended with them, until it ends or nobody listens.
fn send_pieces(call: &Call, head: &Head, index: usize, handle: &Handle, pieces: &mpsc::Sender<(Value, usize)>) {
    loop {
        let (piece, tokens, is_last) = match handle.next() {
            Ok(Ok(text)) if text.is_empty() => continue,
            Ok(Ok(text)) => (answer::piece(call, head, index, &text, None), 0, false),
            Ok(Err(sample)) => (answer::piece(call, head, index, "", Some(&sample)), sample.tokens.len(), true),
            Err(error) => (answer::refusal(&Refusal::new(500, error.message)), 0, true),
        };
        if pieces.blocking_send((piece, tokens)).is_err() || is_last {
            return;
        }
    }
}

/// Waits for all samples, as long as somebody does; then handles are dropped, which ends their sequences.
fn wait_all(handles: Vec<Handle>, waiting: &Weak<()>) -> Result<Vec<Sample>, Refusal> {
    let mut samples = Vec::with_capacity(handles.len());
    for handle in &handles {
        loop {
            if waiting.strong_count() == 0 {
                return Err(Refusal::new(499, "the client has gone"));
            }
            if let Err(sample) = handle.next()? {
                samples.push(sample);
                break;
            }
        }
    }
    Ok(samples)
}

/// Compares in a time that doesn't depend on where they differ.
fn equal(one: &str, other: &str) -> bool {
    let differences = one.bytes().zip(other.bytes()).fold(0, |found, (one, other)| found | (one ^ other));
    one.len() == other.len() && differences == 0
}

fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    let response = Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
    let body = Full::new(Bytes::from(body.to_string()));
    response.body(Either::Left(body)).expect("a response with valid headers")
}
