//! The commands: `gc` and `verify` as somebody types them.

use super::*;

const PIPELINE: &str = "name: demo
params: { word: hello }
stages:
  words: { uses: run, run: 'echo ${params.word} > outputs/out; echo printed', outputs: { out: tree } }
";

/// The times of a folder are the machine's own, so the grace period is short here.
fn sandbox() -> Sandbox {
    let mut sandbox = Sandbox::new();
    sandbox.write("p.yaml", PIPELINE);
    sandbox.variables.push(("CUDA_AGENT_GC_GRACE_S".into(), "0".into()));
    for word in ["one", "two", "three"] {
        sandbox.good(&["run", "p.yaml", "-p", &format!("word={word}")]);
    }
    sandbox
}

/// Records hold times, so their sizes vary.
fn without_sizes(text: &str) -> String {
    let line = |line: &str| {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        words.retain(|word| !matches!(word.trim_end_matches([')', '.']), "B" | "KiB"));
        words.iter().map(|word| if word.starts_with('(') { "(…)" } else { word }).collect::<Vec<_>>().join(" ")
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_command() {
    let sandbox = sandbox();
    let shown = |arguments: &[&str]| without_sizes(&sandbox.stable(&sandbox.good(arguments)));
    insta::assert_snapshot!("gc_plan", shown(&["gc", "--keep-last", "1", "--older-than", "0d"]));
    insta::assert_snapshot!("gc_condemn", shown(&["gc", "--keep-last", "1", "--older-than", "0d", "--delete"]));
    insta::assert_snapshot!("gc_delete", shown(&["gc", "--keep-last", "1", "--older-than", "0d", "--delete"]));
    insta::assert_snapshot!("gc_nothing", shown(&["gc", "--keep-last", "1", "--older-than", "0d", "--delete"]));
    assert!(sandbox.executed(&["p.yaml", "-p", "word=three"]).is_empty(), "what is kept is still a hit");
    assert_eq!(sandbox.executed(&["p.yaml", "-p", "word=one"]), ["words"]);
    assert_eq!(std::fs::read_dir(sandbox.path(".cuda-agent/v1/records")).unwrap().count(), 2, "empty folders go too");
}

#[test]
fn pinned_runs_stay() {
    let sandbox = sandbox();
    let runs: serde_json::Value = serde_json::from_str(&sandbox.good(&["runs", "--json"])).unwrap();
    let first = runs[2]["run"].as_str().unwrap();
    assert_eq!(sandbox.stable(&sandbox.good(&["runs", "--pin", first])), "run [run] is pinned");
    let told = sandbox.good(&["gc", "--json", "--keep-last", "1", "--older-than", "0d", "--delete", "--now"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["outcome"], told["runs"].as_array().unwrap().len()), (&"deleted".into(), 1));
    assert!(sandbox.executed(&["p.yaml", "-p", "word=one"]).is_empty());
    assert_eq!(sandbox.stable(&sandbox.good(&["runs", "--unpin", first])), "run [run] is no longer pinned");
    insta::assert_snapshot!("gc_usage", sandbox.bad(2, &["gc", "--older-than", "1y"]));
    assert!(sandbox.bad(2, &["gc", "--now"]).contains("--delete"));
}

#[test]
fn damage_is_found() {
    let sandbox = sandbox();
    sandbox.good(&["verify", "--digests"]);
    let blobs = || {
        let folders = std::fs::read_dir(sandbox.path(".cuda-agent/v1/blobs")).unwrap();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
        files.map(|file| file.unwrap().path()).collect::<Vec<_>>()
    };
    let (mut count, pack) = (0, Digest::of_bytes(b"two\n").to_string());
    for file in blobs() {
        count += 1;
        if file.ends_with(&pack) {
            std::fs::write(file, "too\n").unwrap();
        }
    }
    let output = sandbox.output(&["verify", "--digests", "--dry-run"]);
    assert_eq!((output.status.code(), blobs().len()), (Some(1), count));
    let output = sandbox.output(&["verify", "--digests"]);
    assert_eq!((output.status.code(), blobs().len()), (Some(1), count - 1));
    let text = sandbox.stable(&String::from_utf8(output.stdout).unwrap());
    let text = text.replace(&pack, "[digest]").replace(&pack[..2], "[aa]");
    insta::assert_snapshot!("verify_damaged", text.lines().skip(3).collect::<Vec<_>>().join("\n"));
    assert_eq!(sandbox.executed(&["p.yaml", "-p", "word=two"]), ["words"], "it is made again");
    sandbox.good(&["verify", "--digests"]);
}

/// Damage in the far tier of two is mended from a good near copy, and else removed.
#[tokio::test]
async fn an_audit_mends_the_far_tier() {
    let folder = tempfile::tempdir().unwrap();
    let near = Tier::folder_at(&folder.path().join("near")).unwrap();
    let mut lab = Lab::new();
    lab.store = Store::tiered(near, Tier::memory(), &folder.path().join("cache"));
    let (report, _) = lab.run("stages: { a: { uses: lab/make } }").await;
    let (tier, artifact) = (lab.store.truth().clone(), report.outputs["a"]["out"].clone());
    let names: Vec<String> = {
        let blobs = lab.store.blobs_of(&artifact).await.unwrap().unwrap();
        let records =
            tier.list("v1/records").await.unwrap().into_iter().map(|meta| format!("v1/records/{}", meta.name));
        blobs.iter().map(blob_name).chain(records).collect()
    };
    assert_eq!(names.len(), 3, "a list, a pack, a record");
    let big = vec![7u8; 9 << 20];
    let big_name = blob_name(&Digest::of_bytes(&big));
    tier.overwrite(&big_name, big).await.unwrap();
    let audit = |dry_run: bool| {
        let store = lab.store.clone();
        async move {
            let mut last = None;
            let audit = store.audit(dry_run, &mut |progress| last = Some(progress)).await.unwrap();
            let last = last.unwrap();
            assert_eq!(last.done, last.total);
            audit
        }
    };
    let good = audit(false).await;
    assert!(good.is_mended() && good.damaged.is_empty() && good.incomplete.is_empty(), "{good:?}");
    assert_eq!(good.checked[&Class::Blobs].objects, 3);
    for name in &names {
        tier.overwrite(name, &b"{}"[..]).await.unwrap();
    }
    let ends = |audit: &cuda_agent_engine::store::audit::Audit| {
        audit.damaged.iter().map(|d| d.end.clone()).collect::<Vec<_>>()
    };
    let found = audit(true).await;
    assert_eq!((ends(&found), found.is_mended()), (vec![End::Left; 3], false));
    let mended = audit(false).await;
    assert_eq!((ends(&mended), mended.is_mended()), (vec![End::Mended; 3], true));
    assert!(audit(false).await.damaged.is_empty());
    // A pack that is damaged in both tiers, and a large blob that nobody else has.
    let pack = lab.store.tree_entries(&artifact).await.unwrap().unwrap()[0].blob;
    for tier in [&tier, lab.store.local()] {
        tier.overwrite(&blob_name(&pack), &b"wrong"[..]).await.unwrap();
    }
    tier.overwrite(&big_name, vec![8u8; 9 << 20]).await.unwrap();
    let removed = audit(false).await;
    assert_eq!(ends(&removed), [End::Removed, End::Removed]);
    assert_eq!((removed.incomplete.len(), removed.incomplete[0].missing), (1, 1));
    assert!(tier.head(&big_name).await.unwrap().is_none());
    let reports = tier.list("v1/gc").await.unwrap();
    assert!(reports.len() == 1 && reports[0].name.starts_with("deleted-"), "others hear of it: {reports:?}");
    assert_eq!(lab.launches("stages: { a: { uses: lab/make } }").await, ["a"], "it is made again");
}

/// A damaged generation goes with those that it replaced: none of them must count again.
#[tokio::test]
async fn a_damaged_replacement_does_not_bring_back_what_it_replaced() {
    let server = Server::new();
    let (store, key) = (server.store(), preimage(1).key());
    for after in 0..3 {
        make(&server, 1, after, &[after], true, None).await;
    }
    let name = |generation: u32| format!("v1/records/{key}/{generation:08}");
    let text = store.truth().read(&name(2)).await.unwrap().unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap().replace("\"number\":1", "\"number\":2");
    store.truth().overwrite(&name(2), text).await.unwrap();
    let audit = store.audit(false, &mut |_| {}).await.unwrap();
    assert_eq!((audit.damaged[0].name.as_str(), &audit.damaged[0].end), (name(2).as_str(), &End::Removed));
    assert_eq!(store.record(&key).await.unwrap().unwrap().0, 3);
    store.truth().overwrite(&name(3), &b"{"[..]).await.unwrap();
    store.audit(false, &mut |_| {}).await.unwrap();
    assert!(store.record(&key).await.unwrap().is_none());
}
