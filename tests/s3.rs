//! What the tests of shared stores stand on: servers, and faults between them and their clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use object_store::aws::AmazonS3Builder;
use object_store::path::Path as Key;
use object_store::{Error, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, RetryConfig};

use crate::support::azure::Azurite;
use crate::support::proxy::{Fault, Faults, Proxy};
use crate::support::s3::{Bucket, S3Server};
use crate::support::service::request;

/// A client that gives up at once, to see each answer as it is.
fn raw(bucket: &Bucket) -> Arc<dyn ObjectStore> {
    let retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let builder = AmazonS3Builder::new().with_url(&bucket.url).with_retry(retries);
    let variables = bucket.env.iter().map(|(name, value)| (name.to_lowercase().parse().unwrap(), value));
    let builder = variables.fold(builder, |builder, (name, value)| builder.with_config(name, value));
    Arc::new(builder.build().unwrap())
}

/// A bucket, and the same bucket behind a proxy.
fn behind_proxy() -> (Bucket, Proxy, Bucket) {
    let bucket = S3Server::seaweed().bucket();
    let proxy = Proxy::start(&bucket.endpoint, Faults::default());
    let seen = bucket.at(proxy.endpoint());
    (bucket, proxy, seen)
}

#[test]
fn seaweedfs_refuses_a_second_creation() {
    let bucket = S3Server::seaweed().bucket();
    objects_come_and_go(&bucket);
}

fn objects_come_and_go(bucket: &Bucket) {
    assert!(bucket.create("a/b", "first"));
    assert!(!bucket.create("a/b", "second"));
    assert_eq!(bucket.get("a/b").unwrap(), "first");
    bucket.put("a/b", "third");
    assert_eq!(bucket.get("a/b").unwrap(), "third");
    assert_eq!(bucket.list("a"), ["a/b"]);
    bucket.delete("a/b");
    assert_eq!((bucket.get("a/b"), bucket.list("")), (None, Vec::new()));
}

/// Why a store asks a server for this before it trusts it.
#[test]
fn rclone_does_not() {
    let server = S3Server::rclone();
    let bucket = server.bucket();
    assert!(bucket.create("a/b", "first"));
    assert!(bucket.create("a/b", "second"));
    assert_eq!(bucket.get("a/b").unwrap(), "second");
}

#[test]
fn a_server_ends_and_leaves_nothing() {
    let server = S3Server::rclone();
    let (folder, port) = (server.folder().to_owned(), server.port());
    drop(server);
    assert_eq!(request("GET", port, "/", ""), None);
    let started = Instant::now();
    while folder.exists() {
        assert!(started.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The losers wait a second at a time for SeaweedFS's lock of the name, so the races are side by side.
#[tokio::test]
async fn a_race_to_create_has_one_winner() {
    let bucket = S3Server::seaweed().bucket();
    join_all((0..4).map(|number| race(&bucket, Key::from(format!("race-{number}"))))).await;
}

async fn race(bucket: &Bucket, key: Key) {
    let stores: Vec<_> = (0..16).map(|_| bucket.store()).collect();
    let put = |who: usize| stores[who].put_opts(&key, format!("{who}").into(), PutMode::Create.into());
    let results = join_all((0..16).map(put)).await;
    let winners: Vec<usize> = (0..16).filter(|who| results[*who].is_ok()).collect();
    let [winner] = winners[..] else { panic!("{winners:?} have all made {key}") };
    assert_eq!(bucket.get(key.as_ref()).unwrap(), winner.to_string());
    for lost in results.into_iter().filter_map(Result::err) {
        assert!(matches!(lost, Error::AlreadyExists { .. }), "{lost}");
    }
}

#[tokio::test]
async fn azurite_has_what_seaweedfs_has() {
    let Some(server) = Azurite::start() else { return };
    let bucket = server.bucket();
    objects_come_and_go(&bucket);
    race(&bucket, Key::from("race")).await;
    let proxy = Proxy::start(&bucket.endpoint, Faults::next(Fault::DoneYetUnavailable, 1));
    assert!(!bucket.at(proxy.endpoint()).create("mine", "x"));
    assert_eq!(bucket.get("mine").unwrap(), "x");
}

#[tokio::test]
async fn a_proxy_passes_everything_on() {
    let (bucket, proxy, seen) = behind_proxy();
    let (store, key) = (seen.store(), Key::from("a folder/großes=object+1"));
    let part = Bytes::from(vec![7; 5 << 20]);
    let mut upload = store.put_multipart(&key).await.unwrap();
    for _ in 0..2 {
        upload.put_part(part.clone().into()).await.unwrap();
    }
    upload.complete().await.unwrap();
    assert_eq!(store.head(&key).await.unwrap().size, 10 << 20);
    assert_eq!(store.get_range(&key, 10..20).await.unwrap().len(), 10);
    assert_eq!(store.get(&key).await.unwrap().bytes().await.unwrap(), vec![7; 10 << 20]);
    assert_eq!(bucket.get(key.as_ref()), seen.get(key.as_ref()));
    assert_eq!(seen.list("a folder"), [key.to_string()]);

    let counts = proxy.take_counts();
    assert_eq!((counts.total, counts.faults), (9, BTreeMap::new()), "{:#?}", counts.log);
    let methods = counts.methods.iter().map(|(method, count)| (method.as_str(), *count));
    assert_eq!(methods.collect::<Vec<_>>(), [("GET", 4), ("HEAD", 1), ("POST", 2), ("PUT", 2)]);
    let uploads = format!("POST /{}/a%20folder/gro%25C3%259Fes%3Dobject%2B1?uploads=", bucket.name);
    assert_eq!(counts.log[0], uploads);
    assert_eq!(proxy.counts().total, 0);
}

/// Each fault once: what a client is told, and what is so.
#[tokio::test]
async fn faults_are_what_they_say() {
    let (bucket, proxy, seen) = behind_proxy();
    let (store, content) = (raw(&seen), Bytes::from(vec![1; 100_000]));
    bucket.put("there", content.clone());

    let lines = [
        (Fault::Failed, "500", false),
        (Fault::DoneYetUnavailable, "503", true),
        (Fault::ResetBefore, "ConnectionReset", false),
        (Fault::ResetAfter, "ConnectionReset", true),
    ];
    for (fault, message, written) in lines {
        let name = format!("{fault:?}");
        proxy.set(Faults::next(fault, 1));
        let error = store.put(&Key::from(name.as_str()), "x".into()).await.unwrap_err();
        assert!(format!("{error:?}").contains(message), "{fault:?}: {error:?}");
        assert_eq!(bucket.get(&name).is_some(), written, "{fault:?}");
        store.put(&Key::from(name.as_str()), "x".into()).await.unwrap();
    }

    // A client cannot tell this from an object that is there.
    proxy.set(Faults::next(Fault::Conflict, 1));
    let error = store.put_opts(&Key::from("none"), "x".into(), PutMode::Create.into()).await.unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    assert_eq!(bucket.get("none"), None);

    let get = async || store.get(&Key::from("there")).await?.bytes().await;
    proxy.set(Faults::next(Fault::SlowBody, 1));
    assert_eq!(get().await.unwrap(), content);
    proxy.set(Faults::next(Fault::ShortBody, 1));
    get().await.unwrap_err();
    proxy.set(Faults::next(Fault::CorruptBody, 1));
    let corrupt = get().await.unwrap();
    assert_eq!(corrupt.iter().zip(&content).filter(|(one, other)| one != other).count(), 1);
    assert_eq!(get().await.unwrap(), content);
    assert_eq!(proxy.counts().faults, Fault::ALL.map(|fault| (fault, 1)).into());
}

/// Why a writer marks what it creates: its client tries again, and finds its own object in its way.
#[test]
fn a_creation_can_be_refused_because_of_itself() {
    let (bucket, proxy, seen) = behind_proxy();
    proxy.set(Faults::next(Fault::DoneYetUnavailable, 1));
    assert!(!seen.create("mine", "x"));
    assert_eq!(bucket.get("mine").unwrap(), "x");
}

#[tokio::test]
async fn a_proxy_denies_writes_and_goes_down() {
    let (bucket, proxy, seen) = behind_proxy();
    let (store, key) = (raw(&seen), Key::from("a"));
    store.put(&key, "x".into()).await.unwrap();

    proxy.deny_writes(true);
    let refused = [store.put(&key, "y".into()).await.unwrap_err(), store.delete(&key).await.unwrap_err()];
    assert!(refused.iter().all(|error| matches!(error, Error::PermissionDenied { .. })), "{refused:?}");
    assert_eq!(seen.get("a").unwrap(), "x");
    proxy.deny_writes(false);

    proxy.down(true);
    let before = proxy.counts().total;
    store.get(&key).await.unwrap_err();
    assert_eq!(proxy.counts().total, before);
    proxy.down(false);
    store.put(&key, "y".into()).await.unwrap();
    assert_eq!(bucket.get("a").unwrap(), "y");
}

/// The same seed breaks the same requests.
#[tokio::test]
async fn faults_follow_their_seed() {
    let (bucket, proxy, seen) = behind_proxy();
    bucket.put("there", "x");
    let store = raw(&seen);
    let mut runs = Vec::new();
    for seed in [1, 1, 2] {
        let kinds = vec![Fault::Failed, Fault::ResetBefore, Fault::ResetAfter];
        let only = Some("GET".to_owned());
        proxy.set(Faults { kinds, probability: 0.3, seed, most: Some(10), only, ..Faults::default() });
        let mut broken = Vec::new();
        for number in 0..60 {
            store.head(&Key::from("there")).await.unwrap();
            if store.get(&Key::from("there")).await.is_err() {
                broken.push(number);
            }
        }
        runs.push((broken, proxy.take_counts().faults));
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
    for (broken, faults) in runs {
        assert_eq!((broken.len(), faults.values().sum()), (10, 10_u64));
    }
}

#[tokio::test]
async fn a_proxy_is_as_slow_as_it_is_told() {
    let (bucket, proxy, seen) = behind_proxy();
    bucket.put("there", "x");
    proxy.set(Faults { latency: Duration::from_millis(100), ..Faults::default() });
    let started = Instant::now();
    raw(&seen).head(&Key::from("there")).await.unwrap();
    assert!(started.elapsed() >= Duration::from_millis(100));
}
