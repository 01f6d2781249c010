//! Garbage collection: what is reachable stays, whatever happens and whenever it is interrupted; the rest goes.

mod command;
mod server;
mod world;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use cuda_agent_engine::artifact::{Artifact, tree};
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::key::{Preimage, ProgramIdentity};
use cuda_agent_engine::store::audit::End;
use cuda_agent_engine::store::gc::{self, Class, Garbage, Policy, Swept, What};
use cuda_agent_engine::store::tier::Tier;
use cuda_agent_engine::store::{Again, Record, RunManifest, StageEntry, StageState, Store, Tag, blob_name};
use cuda_agent_protocol::PortType;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use proptest::prelude::*;

use crate::support::{Lab, Sandbox};

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

use server::*;

/// A writer whose clock is 20 hours behind the server's: what seems written now is 20 hours old, and gc may have condemned it.
#[tokio::test]
async fn how_old_a_blob_is_is_told_by_the_servers_clock() {
    let server = Server::new();
    server.state().now = cuda_agent_engine::now() as u64 + 20 * HOUR;
    let (artifact, contents) = tree_of(&[1], true);
    for bytes in &contents {
        let name = blob_name(&Digest::of_bytes(bytes));
        server.ago(20 * HOUR, server.tier().overwrite(&name, bytes.clone())).await.unwrap();
    }
    let machine = tempfile::tempdir().unwrap();
    let near = Tier::folder_at(&machine.path().join("near")).unwrap();
    let store = Store::tiered(near, server.tier(), &machine.path().join("cache"));
    for bytes in &contents {
        store.put_blob(&Digest::of_bytes(bytes), bytes.clone().into(), Again::No).await.unwrap();
    }
    store.commit(record(1, artifact, None), 0).await.unwrap();
    for bytes in &contents {
        let meta = server.tier().head(&blob_name(&Digest::of_bytes(bytes))).await.unwrap().unwrap();
        assert_eq!(meta.modified as u64, server.state().now, "it was written once more");
    }
}

#[tokio::test]
async fn garbage_goes_in_two_steps() {
    let server = Server::new();
    let store = server.store();
    let (old, new) = old_and_new(&server).await;
    let before = server.names().await;
    let plan = gc::plan(&server.tier(), &policy()).await.unwrap();
    assert_eq!(server.names().await, before, "a plan changes nothing");
    assert_eq!((plan.garbage.runs.as_slice(), plan.wait), (&[run_id(DAY, 1)][..], None));
    let sum = |class| (plan.garbage.going[&class].objects, plan.garbage.staying[&class].objects);
    assert_eq!([Class::Runs, Class::Records, Class::Blobs].map(sum), [(1, 1), (1, 1), (2, 3)]);
    assert!(condemn(&server, &policy()).await.names().eq(plan.garbage.names()));
    assert!(server.names().await.is_superset(&before), "the first step deletes nothing");
    server.pass(DAY / 2);
    let Swept::Waiting(wait) = gc::sweep(&server.tier(), &policy()).await.unwrap() else { panic!() };
    assert_eq!(wait, Duration::from_secs(DAY / 2));
    server.pass(DAY / 2 + 1);
    assert_eq!(gc::plan(&server.tier(), &policy()).await.unwrap().wait, Some(Duration::ZERO));
    let gone = delete(&server, &policy()).await;
    assert_eq!((gone.total(), gone.runs), (plan.garbage.total(), vec![run_id(DAY, 1)]));
    assert!(store.record(&old).await.unwrap().is_none() && store.record(&new).await.unwrap().is_some());
    assert_whole(&store).await;
    let left = server.tier().list("v1/gc").await.unwrap();
    assert_eq!(left.len(), 1, "a report is what is left: {left:?}");
    assert!(matches!(gc::sweep(&server.tier(), &policy()).await.unwrap(), Swept::Nothing(_)));
}

#[tokio::test]
async fn runs_go_before_records_and_records_before_blobs() {
    let server = Server::new();
    let (old, _) = old_and_new(&server).await;
    server.ago(5 * DAY, make(&server, 1, 1, &[7], true, None)).await;
    server.ago(4 * DAY, make(&server, 1, 2, &[8], true, None)).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    server.state().deleted.clear();
    delete(&server, &policy()).await;
    let deleted = server.state().deleted.clone();
    let order: Vec<&str> = deleted.iter().filter_map(|name| name.split('/').nth(1)).filter(|f| *f != "gc").collect();
    let sorted = ["runs", "records", "records", "records", "blobs", "blobs", "blobs", "blobs", "blobs", "blobs"];
    assert_eq!(order, sorted);
    let records: Vec<&str> = deleted.iter().map(String::as_str).filter(|name| name.contains("records")).collect();
    assert_eq!(records, [1, 2, 3].map(|n| format!("v1/records/{old}/{n:08}")), "generations have no holes");
}

#[tokio::test]
async fn what_is_used_again_between_the_steps_stays() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    let third = server.ago(10 * DAY, make(&server, 3, 0, &[4, 5], true, None)).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    // One run finds the old result; another makes one of the old blobs again.
    run(&store, &run_id(7, 9), "p", "running", &[old], &[]).await;
    let other = make(&server, 4, 0, &[5, 6], true, None).await;
    delete(&server, &policy()).await;
    assert!(store.record(&old).await.unwrap().is_some(), "it is in use");
    assert!(store.record(&third).await.unwrap().is_none());
    assert!(store.record(&other).await.unwrap().is_some(), "it is young");
    assert!(!store.has_blob(&Digest::of_bytes(&content(4))).await.unwrap());
    assert!(store.has_blob(&Digest::of_bytes(&content(5))).await.unwrap(), "it was uploaded again");
    assert_whole(&store).await;
}

/// Blobs that were uploaded again stay although no record names them yet, also when that happens while gc is at work.
#[tokio::test]
async fn a_blob_that_is_uploaded_again_in_the_last_moment_stays() {
    let server = Server::new();
    old_and_new(&server).await;
    let blob = Digest::of_bytes(&content(1));
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    let name = blob_name(&blob);
    let prefix: &'static str = name[..11 + 1].trim_end_matches('/').to_owned().leak();
    // The folder is listed for marking, and once more before it is emptied.
    let (again, path, listed) = (server.clone(), Path::from(name.as_str()), Arc::new(Mutex::new(0)));
    fn arm(server: &Server, prefix: &'static str, path: Path, listed: Arc<Mutex<u32>>) {
        let next = server.clone();
        let act = move || {
            *listed.lock().unwrap() += 1;
            if *listed.lock().unwrap() == 1 {
                arm(&next, prefix, path, listed);
            } else {
                let now = next.state().now;
                next.state().times.insert(path, now);
            }
        };
        server.state().meanwhile = Some((prefix, Meanwhile(Box::new(act))));
    }
    arm(&again, prefix, path, listed.clone());
    let gone = delete(&server, &policy()).await;
    assert_eq!((*listed.lock().unwrap(), gone.going[&Class::Blobs].objects), (2, 1));
    assert!(server.store().has_blob(&blob).await.unwrap());
}

#[tokio::test]
async fn a_run_that_begins_while_gc_looks_is_seen() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    run(&store, &run_id(7, 9), "q", "running", &[], &[]).await;
    // Tags are read with the runs; the second time right before the deletion, and in the same second by the server's clock.
    let began = server.clone();
    let act = move || {
        let late = began.clone();
        let act = move || {
            futures::executor::block_on(run(&late.store(), &run_id(7, 9), "q", "running", &[old], &[]));
        };
        began.state().meanwhile = Some(("v1/runs", Meanwhile(Box::new(act))));
    };
    server.state().meanwhile = Some(("v1/tags", Meanwhile(Box::new(act))));
    let gone = delete(&server, &policy()).await;
    assert!(store.record(&old).await.unwrap().is_some());
    assert_eq!(gone.going.keys().collect::<Vec<_>>(), [&Class::Runs], "its old run alone");
    assert_whole(&store).await;
}

/// While gc deletes, a result is made of blobs that it was about to delete, and one that it found in use is given up.
#[tokio::test]
async fn what_comes_while_gc_deletes_is_whole() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    let tagged = server.ago(9 * DAY, make(&server, 3, 0, &[4, 5], true, None)).await;
    let (_, record) = store.record(&old).await.unwrap().unwrap();
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    store.put_tag("name", "v1", &Tag { key: tagged, output: "out".into() }).await.unwrap();
    // The records are listed for marking, and once more when those that are garbage are gone.
    let (at_work, late) = (server.clone(), preimage(50));
    let late = Record { key: late.key(), preimage: late, ..record };
    let key = late.key;
    let act = move || {
        let again = at_work.clone();
        let act = move || {
            futures::executor::block_on(async {
                again.store().commit(late, 0).await.unwrap();
                again.store().truth().delete("v1/tags/name/v1").await.unwrap();
            });
        };
        at_work.state().meanwhile = Some(("v1/records", Meanwhile(Box::new(act))));
    };
    server.state().meanwhile = Some(("v1/records", Meanwhile(Box::new(act))));
    delete(&server, &policy()).await;
    assert!(store.record(&old).await.unwrap().is_none());
    assert!(store.record(&key).await.unwrap().is_some() && store.record(&tagged).await.unwrap().is_some());
    assert_whole(&store).await;
}

#[tokio::test]
async fn generations_that_stay_have_no_holes_below_the_newest() {
    let server = Server::new();
    let store = server.store();
    for after in 0..3 {
        server.ago(9 * DAY, make(&server, 1, after, &[after], true, None)).await;
    }
    let key = preimage(1).key();
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    // Somebody copied a backup over it.
    let first = format!("v1/records/{key}/00000001");
    let bytes = store.truth().read(&first).await.unwrap().unwrap();
    store.truth().overwrite(&first, bytes).await.unwrap();
    delete(&server, &policy()).await;
    assert_eq!(store.record(&key).await.unwrap().unwrap().0, 3, "what was replaced does not come back");
    assert_whole(&store).await;
}

#[tokio::test]
async fn a_damaged_manifest_is_left_to_people() {
    let server = Server::new();
    let (old, _) = old_and_new(&server).await;
    let name = format!("v1/runs/{}", run_id(DAY, 1));
    let log = format!("v1/logs/{}/x.log", run_id(DAY, 1));
    server.ago(9 * DAY, server.tier().overwrite(&name, "{")).await.unwrap();
    server.ago(9 * DAY, server.tier().overwrite(&log, "printed")).await.unwrap();
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    assert_eq!(delete(&server, &policy()).await.unreadable, std::slice::from_ref(&name));
    let left = server.names().await;
    assert!(left.contains(&name) && left.contains(&log));
    assert!(server.store().record(&old).await.unwrap().is_none(), "it keeps nothing");
}

#[tokio::test]
async fn tags_pins_leases_and_announcements() {
    let server = Server::new();
    let store = server.store();
    let mut keys = Vec::new();
    for number in 0..6 {
        let base = (number == 3).then_some(Digest([3; 32]));
        keys.push(server.ago(9 * DAY, make(&server, number, 0, &[number], true, base)).await);
        server
            .ago(9 * DAY, run(&store, &run_id(1, number as usize), "p", "failed", &[keys[number as usize]], &[]))
            .await;
    }
    server.ago(8 * DAY, run(&store, &run_id(0, 99), "p", "failed", &[], &[])).await;
    store.put_tag("name", "v1", &Tag { key: keys[0], output: "out".into() }).await.unwrap();
    gc::pin(&server.tier(), &run_id(1, 1)).await.unwrap();
    let lease = |name: String, holder: &str| {
        let body = format!(r#"{{"run": "{holder}", "host": "h", "process": null}}"#);
        let tier = server.tier();
        async move { tier.overwrite(&format!("v1/leases/{name}"), body).await.unwrap() }
    };
    let live = run_id(1, 77);
    run(&store, &live, "other", "running", &[], &[]).await;
    server.ago(3 * DAY, lease(format!("{}.1", keys[2]), &live)).await;
    server.ago(3 * DAY, lease(format!("{}-0-07.2", Digest([4; 32])), &live)).await;
    server.ago(3 * DAY, lease(format!("{}.1", keys[4]), "nobody")).await;
    server.ago(HOUR, lease(format!("{}.1", keys[5]), "nobody")).await;
    server.ago(3 * DAY, lease("probe-123".into(), "nobody")).await;
    server
        .ago(9 * DAY, async {
            // Rows of a record that is tagged, of a lease, of a base key at work, and of nobody.
            for base in [3, 4, 5, 6] {
                store.put_segment(&Digest([base; 32]), 0, vec![base].into()).await.unwrap();
            }
            for (key, generation) in [(keys[0], 2), (keys[0], 3), (keys[4], 2)] {
                server.tier().overwrite(&format!("v1/replaced/{key}-{generation:08}"), &b"{}"[..]).await.unwrap();
            }
            for run in [&live, &run_id(1, 1)] {
                for folder in ["work", "work-failed"] {
                    let name = format!("v1/{folder}/gpu/{}-{run}-1", keys[0]);
                    server.tier().overwrite(&name, &b"{}"[..]).await.unwrap();
                }
            }
            store.put_worker("gpu", &run_id(2, 1), "{}".into()).await.unwrap();
            for pipeline in ["p", "gone"] {
                server.tier().overwrite(&format!("v1/hints/{pipeline}/{}", Digest([9; 32])), &b"{}"[..]).await.unwrap();
            }
        })
        .await;
    store.put_tag("name", "v2", &Tag { key: keys[3], output: "out".into() }).await.unwrap();
    store.put_segment(&Digest([5; 32]), 1, vec![50].into()).await.unwrap();
    store.put_worker("gpu", &run_id(2, 2), "{}".into()).await.unwrap();
    let before = server.names().await;
    condemn(&server, &policy()).await;
    server.pass(DAY + HOUR);
    run(&store, &live, "other", "running", &[], &[]).await;
    store.put_worker("gpu", &run_id(2, 2), "{}".into()).await.unwrap();
    delete(&server, &policy()).await;
    let after = server.names().await;
    for (number, key) in keys.iter().enumerate() {
        // Tagged; pinned; leased by a run that lives; tagged; by one that does not; by one that may.
        assert_eq!(store.record(key).await.unwrap().is_some(), number != 4, "{number}");
    }
    let gone = |folder: &str| {
        let gone = before.difference(&after).filter(|name| name.starts_with(&format!("v1/{folder}/")));
        gone.map(|name| name.rsplit('/').next().unwrap().to_owned()).collect::<BTreeSet<String>>()
    };
    assert_eq!(gone("leases"), [format!("{}.1", keys[4]), "probe-123".into()].into());
    let segment = format!("00000000-{}.parquet", Digest::of_bytes(&[6]));
    assert_eq!(gone("rows"), [segment].into());
    assert_eq!(gone("replaced"), [format!("{}-00000002", keys[0]), format!("{}-00000002", keys[4])].into());
    // What a run announced that has ended, and what a worker reported that is gone.
    let announced = format!("{}-{}-1", keys[0], run_id(1, 1));
    assert_eq!([gone("work"), gone("work-failed")], [[announced.clone()].into(), [announced].into()]);
    assert_eq!(gone("workers"), [run_id(2, 1)].into());
    assert!(!after.contains(&format!("v1/hints/gone/{}", Digest([9; 32]))));
    assert!(after.contains(&format!("v1/hints/p/{}", Digest([9; 32]))));
    assert_whole(&store).await;
}

const FOREIGN: [&str; 16] = [
    "README",
    "v2/blobs/ab/x",
    "v1/note.txt",
    "v1/blobs/README",
    "v1/blobs/ab/README",
    "v1/blobs/00/1111111111111111111111111111111111111111111111111111111111111111",
    "v1/records/README",
    "v1/records/1111111111111111111111111111111111111111111111111111111111111111/1",
    "v1/rows/x/y.parquet",
    "v1/runs/README",
    "v1/runs/below/README",
    "v1/logs/README/x.log",
    "v1/hints/p/README",
    "v1/leases/README",
    "v1/work/gpu/README",
    "v1/workers/gpu/README",
];

#[tokio::test]
async fn what_is_not_ours_is_not_touched() {
    let server = Server::new();
    for name in FOREIGN {
        assert!(What::of(name).is_none(), "{name}");
        server.ago(50 * DAY, server.tier().overwrite(name, &b"somebody's"[..])).await.unwrap();
    }
    old_and_new(&server).await;
    let garbage = condemn(&server, &policy()).await;
    assert_eq!(garbage.unreadable, ["v1/runs/README", "v1/runs/below/README"], "it is told of");
    server.pass(2 * DAY);
    delete(&server, &policy()).await;
    let alone = Policy { keep_last: 0, now_alone: true, ..policy() };
    delete(&server, &alone).await;
    let left = server.names().await;
    assert!(FOREIGN.iter().all(|name| left.contains(*name)), "{left:?}");
}

#[tokio::test]
async fn two_projects_share_a_bucket() {
    let server = Server::new();
    // In one folder, runs are kept for each pipeline; in two, one knows nothing of the other.
    let key = server.ago(30 * DAY, make(&server, 9, 0, &[9], true, None)).await;
    server.ago(30 * DAY, run(&server.store(), &run_id(0, 9), "q", "done", &[key], &[])).await;
    let prefixed: Arc<dyn ObjectStore> =
        Arc::new(object_store::prefix::PrefixStore::new(server.clone(), "teams/other"));
    let other = Store::over(prefixed, "test://server/teams/other");
    server.ago(30 * DAY, run(&other, &run_id(0, 1), "p", "done", &[], &[])).await;
    server.ago(29 * DAY, run(&other, &run_id(0, 2), "p", "done", &[], &[])).await;
    let (old, new) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    delete(&server, &policy()).await;
    let store = server.store();
    let found = [old, new, key].map(|key| futures::executor::block_on(store.record(&key)).unwrap().is_some());
    assert_eq!(found, [false, true, true]);
    assert_eq!(other.runs().await.unwrap().len(), 2);
    assert!(matches!(gc::sweep(other.truth(), &policy()).await.unwrap(), Swept::Condemned(_)));
    assert!(matches!(gc::sweep(store.truth(), &policy()).await.unwrap(), Swept::Nothing(_)));
}

#[tokio::test]
async fn at_once_is_for_somebody_alone() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    let young = make(&server, 8, 0, &[8], true, None).await;
    run(&store, &run_id(0, 5), "q", "running", &[], &[]).await;
    let alone = Policy { now_alone: true, ..policy() };
    let Swept::Refused(live) = gc::sweep(&server.tier(), &alone).await.unwrap() else { panic!() };
    assert_eq!(live, [run_id(0, 5)]);
    assert!(store.record(&old).await.unwrap().is_some());
    server.pass(601);
    delete(&server, &alone).await;
    assert!(store.record(&old).await.unwrap().is_none() && store.record(&young).await.unwrap().is_none());
    let left = server.tier().list("v1/gc").await.unwrap();
    assert_eq!(left.len(), 1, "what was condemned is forgotten: {left:?}");
    assert_whole(&store).await;
}

#[tokio::test]
async fn runs_that_are_kept() {
    let server = Server::new();
    let store = server.store();
    // By the server's clock, oldest first; the ids say the opposite.
    for (number, outcome) in ["done", "done", "failed", "running", "failed"].into_iter().enumerate() {
        let id = run_id((9 - number as u64) * DAY, number);
        server.ago((50 - number as u64) * DAY, run(&store, &id, "p", outcome, &[], &[])).await;
    }
    let goes = |policy: Policy| {
        let tier = server.tier();
        async move {
            let mut runs = gc::plan(&tier, &policy).await.unwrap().garbage.runs;
            runs.sort();
            runs.iter().map(|id| id[id.len() - 1..].to_owned()).collect::<String>()
        }
    };
    assert_eq!(goes(Policy { keep_last: 9, ..policy() }).await, "");
    assert_eq!(goes(Policy { keep_last: 1, ..policy() }).await, "320", "and the last that ended well");
    assert_eq!(goes(Policy { keep_last: 2, ..policy() }).await, "20", "one that was killed is one that ended");
    let young = Duration::from_secs(48 * DAY);
    assert_eq!(goes(Policy { keep_last: 0, older_than: Some(young), ..policy() }).await, "0");
    let grace = Duration::from_secs(60 * DAY);
    assert_eq!(goes(Policy { keep_last: 0, grace, ..policy() }).await, "");
    server.ago(599, run(&store, &run_id(0, 5), "p", "running", &[], &[])).await;
    server.ago(601, run(&store, &run_id(0, 6), "p", "running", &[], &[])).await;
    let at_once = Policy { keep_last: 0, grace: Duration::ZERO, ..policy() };
    assert_eq!(goes(at_once).await, "64320", "one that goes on stays, however short the grace period");
}

#[tokio::test]
async fn what_cannot_be_read_stops_everything() {
    let server = Server::new();
    let store = server.store();
    let (_, new) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    let before = server.names().await;
    for prefix in ["v1/runs", "v1/tags", "v1/pins", "v1/records", "v1/blobs/7f", "v1/leases", "v1/gc"] {
        server.state().unlistable = Some(prefix);
        assert!(gc::sweep(&server.tier(), &policy()).await.is_err(), "{prefix}");
    }
    server.state().unlistable = None;
    for (name, text, told) in [
        ("v1/tags/a/b", "{", "tag it again"),
        ("v1/runs/20990101T000000.000Z-abcdef", r#"{"schema": 2, "roots": []}"#, "use that version"),
        (&format!("v1/records/{new}/00000002"), r#"{"schema": 2, "outputs": []}"#, "use that version"),
    ] {
        server.tier().overwrite(name, text).await.unwrap();
        let error = gc::sweep(&server.tier(), &policy()).await.unwrap_err();
        assert!(error.hint.as_ref().unwrap().contains(told), "{error}");
        server.tier().delete(name).await.unwrap();
    }
    assert_eq!(server.names().await, before);
    // What is damaged keeps nothing, and is told of.
    server.tier().overwrite(&format!("v1/records/{new}/00000001"), "{").await.unwrap();
    server.tier().overwrite(&format!("v1/runs/{}", run_id(DAY, 2)), "{").await.unwrap();
    let gone = delete(&server, &policy()).await;
    let names = [format!("v1/records/{new}/00000001"), format!("v1/runs/{}", run_id(DAY, 2))];
    assert_eq!(gone.unreadable, names);
    assert!(store.truth().head(&format!("v1/runs/{}", run_id(DAY, 2))).await.unwrap().is_some());
}

/// Machines drop what they know of the store when something was deleted: those that look before, during and after.
#[tokio::test]
async fn what_is_known_of_the_store_is_dropped() {
    let server = Server::new();
    old_and_new(&server).await;
    let folder = tempfile::tempdir().unwrap();
    // A command of a machine: it notices what happened, once.
    let machine = async |name: &str| {
        let near = Tier::folder_at(&folder.path().join(name)).unwrap();
        let store = Store::tiered(near, server.tier(), &folder.path().join(name).join("cache"));
        store.remote().unwrap().catch_up().await.unwrap();
        store
    };
    let knows = async |name: &str| machine(name).await.remote().unwrap().knows("v1/x");
    let learn = async |name: &str| machine(name).await.remote().unwrap().add_known("v1/x");
    learn("before").await;
    learn("during").await;
    condemn(&server, &policy()).await;
    assert!(knows("before").await, "nothing is deleted yet");
    server.pass(2 * DAY);
    server.state().deletions = Some(4);
    gc::sweep(&server.tier(), &policy()).await.unwrap_err();
    server.state().deletions = None;
    assert!(!knows("before").await && !knows("during").await, "a gc that was killed is noticed");
    learn("during").await;
    delete(&server, &policy()).await;
    assert!(!knows("during").await);
    learn("during").await;
    assert!(knows("during").await, "once is enough");
}
