//! Real servers of the S3 protocol on this machine: SeaweedFS, which a shared store can use, and rclone, which it must
//! refuse.
//!
//! A server ends with the process of the tests, whichever way that ends: a shell beside it reads from a pipe that only
//! the tests hold open.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

const ACCESS_KEY: &str = "testaccesskey";
const SECRET_KEY: &str = "testsecretkey";

/// How long a server may take until it answers, on a machine that is busy with other tests.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Becomes the program given after the folder and the pattern of files outside it. When the pipe closes, what stays
/// behind of the shell ends the program and removes what it left.
const KEEPER: &str = r#"
folder=$1 litter=$2; shift 2
exec 3<&0
( read -r nothing; kill -KILL $$; sleep 0.1; rm -rf "$folder" $litter ) <&3 >/dev/null 2>&1 &
exec "$@" </dev/null 3<&- >"$folder/log" 2>&1
"#;

/// A program that serves on the loopback address, until it is dropped or the process of the tests ends.
pub struct Service {
    child: Child,
    pub folder: PathBuf,
    pub ports: Vec<u16>,
}

impl Service {
    /// Starts what `command` makes of a folder and so many free ports, and waits until `ready` says yes.
    pub fn start(ports: usize, command: impl Fn(&Path, &[u16]) -> Command, ready: impl Fn(&[u16]) -> bool) -> Self {
        // Somebody may take a port between the look and the use: then the program ends at once.
        for _ in 0..3 {
            let (folder, ports) = (tempfile::tempdir().unwrap().keep(), free_ports(ports));
            let mut service = Self::spawn(&command(&folder, &ports), folder, ports);
            let started = Instant::now();
            while service.child.try_wait().unwrap().is_none() {
                if ready(&service.ports) {
                    return service;
                }
                assert!(started.elapsed() < START_LIMIT, "the server does not answer:\n{}", service.log());
                std::thread::sleep(Duration::from_millis(20));
            }
            eprintln!("the server ended at its start:\n{}", service.log());
        }
        panic!("the server does not start");
    }

    /// What the program has printed.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    fn spawn(command: &Command, folder: PathBuf, ports: Vec<u16>) -> Self {
        // SeaweedFS makes sockets with names of its own choice.
        let litter: Vec<String> = ports.iter().map(|port| format!("/tmp/seaweedfs-*-{port}.sock")).collect();
        let mut keeper = Command::new("sh");
        keeper.args(["-c", KEEPER, "sh"]).arg(&folder).arg(litter.join(" "));
        keeper.arg(command.get_program()).args(command.get_args());
        keeper.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        keeper.current_dir(&folder).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        Self { child: keeper.spawn().unwrap(), folder, ports }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// A program that `make venv-dev` installs.
pub fn program(name: &str) -> PathBuf {
    let chosen = std::env::var_os("CUDA_AGENT_TEST_BIN").map(PathBuf::from);
    let folders = chosen.into_iter().chain([Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin")]);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates = folders.chain(std::env::split_paths(&path)).map(|folder| folder.join(name));
    candidates
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| panic!("{name} is neither in .venv/bin nor in PATH: `make venv-dev` installs it"))
}

/// Ports below those that the system gives to outgoing connections, so that no client comes to sit on one.
fn free_ports(count: usize) -> Vec<u16> {
    let random = RandomState::new();
    let start = |attempt: u64| 10_000 + (random.hash_one(attempt) % 20_000) as u16;
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port));
    for attempt in 0.. {
        let ports: Vec<u16> = (start(attempt)..).take(count).collect();
        if ports.iter().map(|port| free(*port)).collect::<Result<Vec<_>, _>>().is_ok() {
            return ports;
        }
    }
    unreachable!()
}

/// The status of the answer to a plain request; nothing while there is no answer.
pub fn request(method: &str, port: u16, path: &str, body: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n");
    write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}").ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer);
    answer.split(' ').nth(1)?.parse().ok()
}

/// Waits for something that needs a runtime, from a test with or without one.
pub fn wait<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    static RUNTIME: LazyLock<tokio::runtime::Runtime> =
        LazyLock::new(|| tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    let (sender, receiver) = mpsc::channel();
    RUNTIME.spawn(async move { sender.send(work.await) });
    receiver.recv().expect("the work panicked")
}

/// A server with buckets.
pub struct S3Server {
    service: Service,
    buckets: AtomicU64,
    kind: Kind,
}

enum Kind {
    Seaweed,
    Rclone,
}

impl S3Server {
    /// The SeaweedFS of this process of tests, which has conditional writes as S3 has them.
    pub fn seaweed() -> &'static Self {
        static SERVER: LazyLock<S3Server> = LazyLock::new(S3Server::own_seaweed);
        &SERVER
    }

    /// A SeaweedFS of one's own, to end or to hold still.
    pub fn own_seaweed() -> Self {
        let service = Service::start(8, weed, |ports| {
            // The filer takes a file only when a volume is there for it.
            request("GET", ports[0], "/", "") == Some(403) && request("PUT", ports[6], "/ready", "x") == Some(201)
        });
        Self { service, buckets: AtomicU64::new(0), kind: Kind::Seaweed }
    }

    /// A server that ignores the condition of a conditional write.
    pub fn rclone() -> Self {
        let command = |folder: &Path, ports: &[u16]| {
            let mut command = Command::new(program("rclone"));
            command.args(["serve", "s3", "--auth-key", &format!("{ACCESS_KEY},{SECRET_KEY}")]);
            command.args(["--addr", &format!("127.0.0.1:{}", ports[0])]).arg(folder);
            command.env("RCLONE_CONFIG", "/dev/null");
            command
        };
        let service = Service::start(1, command, |ports| request("GET", ports[0], "/", "").is_some());
        Self { service, buckets: AtomicU64::new(0), kind: Kind::Rclone }
    }

    pub fn port(&self) -> u16 {
        self.service.ports[0]
    }

    /// Where the server keeps its files.
    pub fn folder(&self) -> &Path {
        &self.service.folder
    }

    /// A new bucket.
    pub fn bucket(&self) -> Bucket {
        let name = format!("bucket-{}", self.buckets.fetch_add(1, Ordering::Relaxed));
        match self.kind {
            Kind::Seaweed => {
                let made = request("POST", self.service.ports[6], &format!("/buckets/{name}/"), "");
                assert_eq!(made, Some(201), "SeaweedFS does not make {name}");
            }
            Kind::Rclone => std::fs::create_dir(self.service.folder.join(&name)).unwrap(),
        }
        Bucket::new(format!("http://127.0.0.1:{}", self.port()), name)
    }
}

fn weed(folder: &Path, ports: &[u16]) -> Command {
    let identity = serde_json::json!({
        "name": "tests", "actions": ["Admin"],
        "credentials": [{ "accessKey": ACCESS_KEY, "secretKey": SECRET_KEY }],
    });
    let config = folder.join("s3.json");
    std::fs::write(&config, serde_json::json!({ "identities": [identity] }).to_string()).unwrap();
    let data = folder.join("data");
    std::fs::create_dir(&data).unwrap();
    let mut command = Command::new(program("weed"));
    command.args(["-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]);
    let names = ["s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc"];
    for (name, port) in names.iter().zip(ports) {
        let (service, grpc) = name.split_once('.').map_or((*name, ""), |(service, _)| (service, ".grpc"));
        command.arg(format!("-{service}.port{grpc}={port}"));
    }
    for (name, value) in [("dir", &data), ("s3.config", &config)] {
        command.arg(format!("-{name}={}", value.display()));
    }
    for name in ["s3", "filer"] {
        command.arg(format!("-{name}.localSocket={}", folder.join(name).with_extension("sock").display()));
    }
    // Each bucket has a volume of its own, a file that grows as it is written to.
    command.args(["-master.volumeSizeLimitMB=256", "-volume.max=1000", "-volume.minFreeSpace=1MiB"]);
    command.env("WEED_MASTER_VOLUME_GROWTH_COPY_1", "1");
    command.args(["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]);
    command
}

/// A bucket that a test has to itself, as the test sees it, past whatever the program under test believes.
#[derive(Clone)]
pub struct Bucket {
    pub endpoint: String,
    pub name: String,
    /// What a project file says: `s3://name`.
    pub url: String,
    /// The variables with which a client reaches it.
    pub env: Vec<(String, String)>,
}

impl Bucket {
    fn new(endpoint: String, name: String) -> Self {
        let values = [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", &endpoint),
            ("AWS_ALLOW_HTTP", "true"),
        ];
        let env = values.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { url: format!("s3://{name}"), env, endpoint, name }
    }

    /// The same bucket behind another address, as that of a proxy.
    pub fn at(&self, endpoint: &str) -> Self {
        Self::new(endpoint.to_owned(), self.name.clone())
    }

    /// Made of the variables, as the program under test does.
    pub fn builder(&self) -> AmazonS3Builder {
        let variables = self.env.iter().map(|(name, value)| (name.to_lowercase().parse().unwrap(), value));
        variables
            .fold(AmazonS3Builder::new().with_url(&self.url), |builder, (name, value)| builder.with_config(name, value))
    }

    pub fn store(&self) -> Arc<dyn ObjectStore> {
        Arc::new(self.builder().build().unwrap())
    }

    /// The names below a prefix, sorted.
    pub fn list(&self, prefix: &str) -> Vec<String> {
        let (store, prefix) = (self.store(), Key::from(prefix));
        let mut names: Vec<String> = wait(async move {
            store.list(Some(&prefix)).map_ok(|object| object.location.to_string()).try_collect().await.unwrap()
        });
        names.sort();
        names
    }

    pub fn get(&self, name: &str) -> Option<Bytes> {
        let (store, name) = (self.store(), Key::from(name));
        wait(async move {
            match store.get(&name).await {
                Ok(found) => Some(found.bytes().await.unwrap()),
                Err(object_store::Error::NotFound { .. }) => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    pub fn put(&self, name: &str, bytes: impl Into<Bytes>) {
        let (store, name, bytes) = (self.store(), Key::from(name), bytes.into());
        wait(async move { store.put(&name, bytes.into()).await.unwrap() });
    }

    /// Whether this write made the object.
    pub fn create(&self, name: &str, bytes: impl Into<Bytes>) -> bool {
        let (store, name, bytes) = (self.store(), Key::from(name), bytes.into());
        wait(async move {
            match store.put_opts(&name, bytes.into(), PutMode::Create.into()).await {
                Ok(_) => true,
                Err(object_store::Error::AlreadyExists { .. }) => false,
                Err(error) => panic!("{error}"),
            }
        })
    }

    pub fn delete(&self, name: &str) {
        let (store, name) = (self.store(), Key::from(name));
        wait(async move { store.delete(&name).await.unwrap() });
    }
}
