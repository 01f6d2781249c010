//! Azurite, a server of the protocol of Azure's blob storage, where `make azurite` has installed it.

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::s3::Bucket;
use super::service::{Service, request};

/// Every Azurite has this account and this key; they are public.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// A shared access signature by that key, which permits to make containers.
const MAY_CREATE: &str = "sp=c&ss=b&srt=c&se=2099-01-01T00%3A00%3A00Z&spr=https%2Chttp&sv=2019-12-12\
    &sig=EB2dmffs9djp0%2Fav61Lrza5cV%2BgoSVgTanW1U9Y3T6Q%3D";

/// A server with containers, which a test has as buckets.
pub struct Azurite {
    service: Service,
    containers: AtomicU64,
}

impl Azurite {
    /// The Azurite of this process of tests; none, and a word about it, where it is not installed.
    pub fn start() -> Option<&'static Self> {
        static SERVER: LazyLock<Option<Azurite>> = LazyLock::new(Azurite::installed);
        if SERVER.is_none() {
            eprintln!("skipped: `make azurite` installs the server that this test needs, with npm");
        }
        SERVER.as_ref()
    }

    fn installed() -> Option<Self> {
        let modules = super::repository().join("build/azurite/node_modules");
        let program = modules.join(".bin/azurite-blob");
        program.is_file().then(|| {
            let command = |_: &Path, ports: &[u16]| {
                let mut command = Command::new(&program);
                command.args(["--blobHost", "127.0.0.1", "--blobPort", &ports[0].to_string()]);
                command.args(["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]);
                command
            };
            let service = Service::start(1, command, |ports| request("GET", ports[0], "/", "").is_some());
            Self { service, containers: AtomicU64::new(0) }
        })
    }

    /// A new container.
    pub fn bucket(&self) -> Bucket {
        let (port, name) =
            (self.service.ports[0], format!("container-{}", self.containers.fetch_add(1, Ordering::Relaxed)));
        let made = request("PUT", port, &format!("/{ACCOUNT}/{name}?restype=container&{MAY_CREATE}"), "");
        assert_eq!(made, Some(201), "Azurite does not make {name}");
        let endpoint = format!("http://127.0.0.1:{port}");
        let env = [
            ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT),
            ("AZURE_STORAGE_ACCOUNT_KEY", KEY),
            ("AZURE_STORAGE_ENDPOINT", &format!("{endpoint}/{ACCOUNT}")),
            ("AZURE_ALLOW_HTTP", "true"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Bucket { url: format!("az://{name}"), env, endpoint, name }
    }
}
