//! Real servers of the S3 protocol on this machine: SeaweedFS, which a shared store can use, and rclone, which it must
//! refuse.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use url::Url;

use super::service::{Service, program, request, wait};

const ACCESS_KEY: &str = "testaccesskey";
const SECRET_KEY: &str = "testsecretkey";
/// Who may only read and list.
const READER: (&str, &str) = ("readeraccesskey", "readersecretkey");

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
        Bucket::s3(format!("http://127.0.0.1:{}", self.port()), name)
    }
}

fn weed(folder: &Path, ports: &[u16]) -> Command {
    let identity = serde_json::json!({
        "name": "tests", "actions": ["Admin"],
        "credentials": [{ "accessKey": ACCESS_KEY, "secretKey": SECRET_KEY }],
    });
    let config = folder.join("s3.json");
    let reader = serde_json::json!({
        "name": "reader", "actions": ["Read", "List"],
        "credentials": [{ "accessKey": READER.0, "secretKey": READER.1 }],
    });
    std::fs::write(&config, serde_json::json!({ "identities": [identity, reader] }).to_string()).unwrap();
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
    fn s3(endpoint: String, name: String) -> Self {
        let env = [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", &endpoint),
            ("AWS_ALLOW_HTTP", "true"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { url: format!("s3://{name}"), env, endpoint, name }
    }

    /// The same bucket behind another address, as that of a proxy.
    pub fn at(&self, endpoint: &str) -> Self {
        let moved = |(name, value): &(String, String)| (name.clone(), value.replace(&self.endpoint, endpoint));
        Self { endpoint: endpoint.to_owned(), env: self.env.iter().map(moved).collect(), ..self.clone() }
    }

    /// The same bucket for somebody who may only read it.
    pub fn for_reader(&self) -> Self {
        let reading = |(name, value): &(String, String)| {
            let value = match name.as_str() {
                "AWS_ACCESS_KEY_ID" => READER.0,
                "AWS_SECRET_ACCESS_KEY" => READER.1,
                _ => value,
            };
            (name.clone(), value.to_owned())
        };
        Self { env: self.env.iter().map(reading).collect(), ..self.clone() }
    }

    pub fn store(&self) -> Arc<dyn ObjectStore> {
        let (store, _) = object_store::parse_url_opts(&Url::parse(&self.url).unwrap(), self.env.clone()).unwrap();
        store.into()
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
