//! A proxy between a client and an S3 server: counts requests, makes them slow, and breaks them by a seeded plan.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, Scheme, Uri};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// One way in which a request goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// 500, and the server never hears of the request.
    Failed,
    /// 503, though the server has done what was asked.
    DoneYetUnavailable,
    /// 409 on a PUT that the server never hears of, as S3 answers when conditional writes meet.
    Conflict,
    /// The body of a GET comes in small pieces.
    SlowBody,
    /// The connection closes in the middle of a GET's body.
    ShortBody,
    /// One byte of a GET's body is another one.
    CorruptBody,
    /// The connection is reset, and the server never hears of the request.
    ResetBefore,
    /// The connection is reset once the server has done what was asked.
    ResetAfter,
}

impl Fault {
    pub const ALL: [Self; 8] = [
        Self::Failed,
        Self::DoneYetUnavailable,
        Self::Conflict,
        Self::SlowBody,
        Self::ShortBody,
        Self::CorruptBody,
        Self::ResetBefore,
        Self::ResetAfter,
    ];

    fn can_befall(self, request: &Parts) -> bool {
        let lists = request.uri.query().is_some_and(|query| query.contains("list-type="));
        match self {
            Self::Conflict => request.method == Method::PUT,
            Self::SlowBody | Self::ShortBody => request.method == Method::GET,
            // A list has no digest to tell by, so no client could notice.
            Self::CorruptBody => request.method == Method::GET && !lists,
            _ => true,
        }
    }
}

/// Which requests go wrong, and how.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    pub kinds: Vec<Fault>,
    /// Of a request that one of the kinds can befall.
    pub probability: f64,
    pub seed: u64,
    /// How many faults there are at most.
    pub most: Option<u64>,
    /// Only requests whose line in the log contains this.
    pub only: Option<String>,
    /// What each request waits, gone wrong or not.
    pub latency: Duration,
}

impl Faults {
    /// Requests that go wrong without exception, so many of them.
    pub fn next(kind: Fault, most: u64) -> Self {
        Self { kinds: vec![kind], probability: 1.0, most: Some(most), ..Self::default() }
    }
}

/// What the proxy has seen.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub total: u64,
    pub methods: BTreeMap<String, u64>,
    pub faults: BTreeMap<Fault, u64>,
    /// `METHOD path?query`, in the order of arrival.
    pub log: Vec<String>,
}

struct State {
    target: Authority,
    client: Client<HttpConnector, Full<Bytes>>,
    faults: Mutex<Faults>,
    counts: Mutex<Counts>,
    deny_writes: AtomicBool,
    down: watch::Sender<bool>,
}

/// Ends when it is dropped, and its connections with it.
pub struct Proxy {
    endpoint: String,
    state: Arc<State>,
    runtime: Option<Runtime>,
}

impl Proxy {
    /// A proxy in front of `target`, an address as `http://127.0.0.1:8333`.
    pub fn start(target: &str, faults: Faults) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let state = Arc::new(State {
            target: target.strip_prefix("http://").unwrap().parse().unwrap(),
            // The signature of a request covers the host that its client knows.
            client: Client::builder(TokioExecutor::new()).set_host(false).build(connector),
            faults: Mutex::new(faults),
            counts: Mutex::default(),
            deny_writes: AtomicBool::new(false),
            down: watch::Sender::new(false),
        });
        runtime.spawn(accept(listener, state.clone()));
        Self { endpoint, state, runtime: Some(runtime) }
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Other faults from now on; their number counts anew.
    pub fn set(&self, faults: Faults) {
        *self.state.faults.lock().unwrap() = faults;
    }

    pub fn counts(&self) -> Counts {
        self.state.counts.lock().unwrap().clone()
    }

    /// How many requests' lines in the log contain this.
    pub fn seen(&self, part: &str) -> usize {
        self.state.counts.lock().unwrap().log.iter().filter(|line| line.contains(part)).count()
    }

    /// What was counted so far, counting from nothing again.
    pub fn take_counts(&self) -> Counts {
        std::mem::take(&mut self.state.counts.lock().unwrap())
    }

    /// Whether writes are refused, as by a bucket that one may only read.
    pub fn deny_writes(&self, deny: bool) {
        self.state.deny_writes.store(deny, Ordering::SeqCst);
    }

    /// Whether connections are reset, those there are and those to come.
    pub fn down(&self, down: bool) {
        self.state.down.send_replace(down);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

async fn accept(listener: std::net::TcpListener, state: Arc<State>) {
    let listener = TcpListener::from_std(listener).unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        tokio::spawn(serve(stream, state.clone()));
    }
}

/// Serves the requests of one connection.
async fn serve(stream: TcpStream, state: Arc<State>) {
    stream.set_nodelay(true).unwrap();
    let mut down = state.down.subscribe();
    let reset = Arc::new(AtomicBool::new(false));
    let service = service_fn(|request| {
        let (state, reset) = (state.clone(), reset.clone());
        Box::pin(async move { state.answer(request, &reset).await })
    });
    let mut connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        biased;
        _ = down.wait_for(|down| *down) => reset.store(true, Ordering::SeqCst),
        _ = poll_fn(|context| connection.poll_without_shutdown(context)) => {}
    }
    let stream = connection.into_parts().io.into_inner();
    if reset.load(Ordering::SeqCst) {
        let _ = stream.set_zero_linger();
    }
}

impl State {
    /// An answer, or an error that ends the connection.
    async fn answer(&self, request: Request<Incoming>, reset: &AtomicBool) -> io::Result<Response<Body>> {
        let (request, body) = request.into_parts();
        let (fault, random, latency) = self.note(&request);
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        let cut = || {
            reset.store(true, Ordering::SeqCst);
            Err(io::ErrorKind::ConnectionReset.into())
        };
        if fault == Some(Fault::ResetBefore) {
            return cut();
        }
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let writes = ![Method::GET, Method::HEAD].contains(&request.method);
        if writes && self.deny_writes.load(Ordering::SeqCst) {
            return Ok(refusal(StatusCode::FORBIDDEN, "AccessDenied"));
        }
        match fault {
            Some(Fault::Failed) => return Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")),
            Some(Fault::Conflict) => return Ok(refusal(StatusCode::CONFLICT, "ConditionalRequestConflict")),
            _ => {}
        }
        let Ok(response) = self.forward(request, body).await else {
            return Ok(refusal(StatusCode::BAD_GATEWAY, "BadGateway"));
        };
        match fault {
            Some(Fault::DoneYetUnavailable) => Ok(refusal(StatusCode::SERVICE_UNAVAILABLE, "SlowDown")),
            Some(Fault::ResetAfter) => cut(),
            Some(Fault::SlowBody) => replace_body(response, slow).await,
            Some(Fault::ShortBody) => replace_body(response, short).await,
            Some(Fault::CorruptBody) => replace_body(response, |bytes| corrupt(bytes, random)).await,
            _ => Ok(response.map(|body| body.map_err(io::Error::other).boxed_unsync())),
        }
    }

    /// Counts a request and decides about it: its fault, a random number, and how long it waits.
    fn note(&self, request: &Parts) -> (Option<Fault>, u64, Duration) {
        let line = format!("{} {}", request.method, request.uri);
        let mut faults = self.faults.lock().unwrap();
        let mut counts = self.counts.lock().unwrap();
        let latency = faults.latency;
        let kinds: Vec<Fault> = faults.kinds.iter().copied().filter(|kind| kind.can_befall(request)).collect();
        let meant = faults.only.as_ref().is_none_or(|only| line.contains(only.as_str()));
        counts.total += 1;
        *counts.methods.entry(request.method.to_string()).or_default() += 1;
        counts.log.push(line);
        if !meant || kinds.is_empty() || faults.most == Some(0) {
            return (None, 0, latency);
        }
        let (draw, random) = (mix(&mut faults.seed), mix(&mut faults.seed));
        if draw as f64 >= faults.probability * u64::MAX as f64 {
            return (None, 0, latency);
        }
        let fault = kinds[(random % kinds.len() as u64) as usize];
        faults.most = faults.most.map(|most| most - 1);
        *counts.faults.entry(fault).or_default() += 1;
        (Some(fault), random, latency)
    }

    async fn forward(&self, mut request: Parts, body: Bytes) -> io::Result<Response<Incoming>> {
        let mut uri = request.uri.into_parts();
        (uri.scheme, uri.authority) = (Some(Scheme::HTTP), Some(self.target.clone()));
        request.uri = Uri::from_parts(uri).map_err(io::Error::other)?;
        self.client.request(Request::from_parts(request, Full::new(body))).await.map_err(io::Error::other)
    }
}

/// The next number of a sequence that looks random (SplitMix64).
fn mix(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn refusal(status: StatusCode, code: &str) -> Response<Body> {
    let text = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>by the proxy</Message></Error>");
    let body = Full::from(text).map_err(|never: Infallible| match never {}).boxed_unsync();
    Response::builder().status(status).header("content-type", "application/xml").body(body).unwrap()
}

async fn replace_body(response: Response<Incoming>, change: impl FnOnce(Bytes) -> Body) -> io::Result<Response<Body>> {
    let (parts, body) = response.into_parts();
    Ok(Response::from_parts(parts, change(body.collect().await.map_err(io::Error::other)?.to_bytes())))
}

/// The same bytes, each piece after a pause.
fn slow(bytes: Bytes) -> Body {
    pieces((0..8).map(|part| Ok(bytes.slice(bytes.len() * part / 8..bytes.len() * (part + 1) / 8))).collect())
}

/// The first half, and then an error that closes the connection.
fn short(bytes: Bytes) -> Body {
    pieces(vec![Ok(bytes.slice(..bytes.len() / 2)), Err(io::ErrorKind::ConnectionAborted.into())])
}

/// The pause lets the server write a piece before it meets the next one.
fn pieces(pieces: Vec<io::Result<Bytes>>) -> Body {
    let pieces = stream::unfold(pieces.into_iter(), |mut pieces| async {
        let piece = pieces.next()?;
        tokio::time::sleep(Duration::from_millis(10)).await;
        Some((piece.map(Frame::data), pieces))
    });
    StreamBody::new(pieces).boxed_unsync()
}

fn corrupt(bytes: Bytes, random: u64) -> Body {
    let mut bytes = bytes.to_vec();
    if !bytes.is_empty() {
        let place = random as usize % bytes.len();
        bytes[place] ^= 1 << ((random >> 32) % 8);
    }
    Full::from(bytes).map_err(|never: Infallible| match never {}).boxed_unsync()
}
