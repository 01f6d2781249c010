//! Stages that have checkpoints: what they go on from, here and on another machine.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::shared::machine;
use crate::support::Sandbox;
use crate::support::s3::{Bucket, S3Server};

/// A kind that walks: each step adds a line, and a checkpoint has the lines so far. More steps go on from fewer.
fn write_walk(sandbox: &Sandbox, pause: &str) {
    write_kind(sandbox, pause, "continues: true", "");
}

/// The same where no parameter continues: more steps are another walk.
fn write_whole_walk(sandbox: &Sandbox, pause: &str) {
    write_kind(sandbox, pause, "min: 1", "checkpoints: true\n");
}

fn write_kind(sandbox: &Sandbox, pause: &str, steps: &str, more: &str) {
    sandbox.write(
        "kinds/walk/stage.yaml",
        &format!(
            "name: my/walk\nversion: 1.0.0\nsummary: Walks.\noutputs: {{ out: {{ type: tree }} }}\n\
             params: {{ steps: {{ type: integer, {steps} }}, start: {{ type: integer, default: 0 }} }}\n\
             {more}run: [sh, walk.sh]\nsources: [walk.sh]\n"
        ),
    );
    let script = r#"steps=$(sed 's/.*"steps":\([0-9]*\).*/\1/' request.json)
state=$(sed 's/.*"state_dir":"\([^"]*\)".*/\1/' request.json)
mkdir -p "$state/checkpoints"
step=0
for folder in "$state"/checkpoints/step-*; do
  number=${folder##*-}
  if [ -d "$folder" ] && [ "$number" -le "$steps" ] && [ "$number" -gt "$step" ]; then step=$number; fi
done
if [ "$step" -gt 0 ]; then cp "$state/checkpoints/step-$step/walk" walk; else : > walk; fi
echo "starts after $step"
while [ "$step" -lt "$steps" ]; do
  step=$((step + 1))
  echo "step $step" >> walk
  rm -rf "$state/checkpoints/new"
  mkdir "$state/checkpoints/new"
  cp walk "$state/checkpoints/new/walk"
  mv "$state/checkpoints/new" "$state/checkpoints/step-$step"
  printf '{"event":"checkpoint","path":"checkpoints/step-%s","order":%s}\n' "$step" "$step" >&"$CUDA_AGENT_EVENTS_FD"
  PAUSE
done
cp walk outputs/out
"#;
    sandbox.write("kinds/walk/walk.sh", &script.replace("PAUSE", pause));
    sandbox.write(
        "walk.yaml",
        "name: walk\nparams: { steps: 3, start: 0 }\nstages:\n  \
         walk: { uses: my/walk, with: { steps: '${params.steps}', start: '${params.start}' } }\n",
    );
}

fn local() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n");
    write_walk(&sandbox, ":");
    sandbox
}

/// Runs to so many steps; after which step the program started.
fn walk(sandbox: &Sandbox, steps: u64) -> u64 {
    sandbox.good(&["run", "walk.yaml", "-p", &format!("steps={steps}")]);
    sandbox.good(&["export", "walk", "made"]);
    let made = std::fs::read_to_string(sandbox.path("made/out")).unwrap();
    let all: String = (1..=steps).map(|step| format!("step {step}\n")).collect();
    assert_eq!(made, all);
    std::fs::remove_dir_all(sandbox.path("made")).unwrap();
    started_after(sandbox)
}

fn started_after(sandbox: &Sandbox) -> u64 {
    let log = sandbox.good(&["log", "walk"]);
    let line = log.lines().find_map(|line| line.split_once("starts after ").map(|(_, step)| step.to_owned()));
    line.unwrap_or_else(|| panic!("{log}")).trim().parse().unwrap()
}

#[test]
fn raising_the_parameter_goes_on_from_the_last_checkpoint() {
    let sandbox = local();
    assert_eq!(walk(&sandbox, 3), 0);
    assert_eq!(walk(&sandbox, 5), 3);
    // Fewer steps are the beginning of more, and what was made once is made.
    assert_eq!(walk(&sandbox, 4), 4);
    assert_eq!(sandbox.executed(&["walk.yaml", "-p", "steps=5"]), [""; 0]);
    // Another start is another walk.
    sandbox.good(&["run", "walk.yaml", "-p", "steps=6", "-p", "start=1"]);
    assert_eq!(started_after(&sandbox), 0);
    // Where the store is the project's own, checkpoints are not copied into it.
    assert!(!sandbox.path(".cuda-agent/v1/checkpoints").exists());
}

#[test]
fn stages_that_run_at_the_same_time_do_not_share_a_state_folder() {
    let sandbox = local();
    write_walk(&sandbox, "sleep 0.05");
    sandbox.write(
        "both.yaml",
        "name: both\nstages:\n  walk:\n    uses: my/walk\n    matrix: { steps: [6, 9] }\n    with: { steps: '${matrix.steps}' }\n",
    );
    let said = sandbox.output(&["run", "both.yaml", "--jobs", "2"]);
    let said = String::from_utf8(said.stderr).unwrap() + &String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("a stage that differs in how far it goes is at work here"), "{said}");
    for steps in [6, 9] {
        sandbox.good(&["export", &format!("walk[steps={steps}]"), "made", "--pipeline", "both.yaml"]);
        let made = std::fs::read_to_string(sandbox.path("made/out")).unwrap();
        assert_eq!(made.lines().count(), steps);
        std::fs::remove_dir_all(sandbox.path("made")).unwrap();
    }
}

#[test]
fn another_machine_goes_on_from_what_was_shared() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    [&one, &two].iter().for_each(|machine| write_walk(machine, ":"));
    assert_eq!(walk(&one, 3), 0);
    assert_eq!(walk(&two, 5), 3);
    // The second one's went further; the first has its own up to 3.
    assert_eq!(walk(&one, 6), 5);
    let lists = bucket.list("team/v1/checkpoints");
    assert_eq!(lists.len(), 2, "two of them stay: {lists:?}");
    // The pipeline's last runs keep them, and what they name, through a gc.
    one.good(&["gc", "--delete", "--now"]);
    assert_eq!(bucket.list("team/v1/checkpoints"), lists);
    let three = machine(&bucket);
    write_walk(&three, ":");
    assert_eq!(walk(&three, 7), 6);
}

/// Starts 60 steps on a machine that is lost with its disk in mid-run, when it has shared something.
fn lose(mut machine: Sandbox, bucket: &Bucket) {
    machine.variables.push(("CUDA_AGENT_CHECKPOINT_EVERY_S".into(), "0".into()));
    let mut command = machine.command(&["run", "walk.yaml", "-p", "steps=60"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let patience = Instant::now();
    while bucket.list("team/v1/checkpoints").len() < 2 {
        assert!(patience.elapsed() < Duration::from_secs(60), "no checkpoint was shared");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_machine_that_is_lost_takes_only_the_last_steps_with_it() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    // The same program is the same walk: a pause would be another.
    [&one, &two].iter().for_each(|machine| write_walk(machine, "sleep 0.1"));
    lose(one, &bucket);
    let after = walk(&two, 60);
    assert!((1..60).contains(&after), "{after}");
}

/// Without a parameter that continues the same work alone goes on from them, and nobody once it is done.
#[test]
fn checkpoints_of_the_same_work_are_shared_until_it_is_done() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    [&one, &two].iter().for_each(|machine| write_whole_walk(machine, "sleep 0.1"));
    lose(one, &bucket);
    let shared = bucket.list("team/v1/checkpoints");
    assert_eq!(walk(&two, 4), 0, "fewer steps are no part of more");
    assert_eq!(bucket.list("team/v1/checkpoints"), shared, "those of the 4 steps are gone, and no others");
    let after = walk(&two, 60);
    assert!((1..60).contains(&after), "{after}");
    assert!(bucket.list("team/v1/checkpoints").is_empty());
}

/// What it reached before it failed is shared, also what was told of just then.
#[test]
fn a_stage_that_fails_leaves_its_last_checkpoint_to_others() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    // The same program on both: what it fails for is outside.
    let trouble = tempfile::NamedTempFile::new().unwrap();
    let fails = format!("if [ \"$step\" = 3 ] && [ -e {} ]; then exit 1; fi", trouble.path().display());
    [&one, &two].iter().for_each(|machine| write_whole_walk(machine, &fails));
    assert!(!one.output(&["run", "walk.yaml", "-p", "steps=5"]).status.success());
    trouble.close().unwrap();
    assert_eq!(walk(&two, 5), 3);
}

#[test]
fn what_is_no_checkpoint_is_told_and_costs_nothing() {
    let sandbox = local();
    let event = |path: &str| {
        format!("printf '{{\"event\":\"checkpoint\",\"path\":\"{path}\",\"order\":1}}\\n' >&$CUDA_AGENT_EVENTS_FD")
    };
    write_walk(&sandbox, &[event("../../x"), event("nothing"), event("")].join("; "));
    let output = sandbox.output(&["run", "walk.yaml", "-p", "steps=1"]);
    let said = String::from_utf8(output.stderr).unwrap() + &String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for path in ["../../x", "nothing", ""] {
        let message = format!("a checkpoint that it told of is not shared: {path:?} is no folder in the state folder");
        assert!(said.contains(&message), "{said}");
    }
}
