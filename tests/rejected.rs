//! Rejected rows are left out of tables, and every command that tells of a stage says so.

use crate::support::{Sandbox, write_ids};

/// A sandbox whose program rejects odd ids.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n").write_squares("if [ $((id % 2)) = 1 ]; then\n    \
        printf '{\"event\":\"row\",\"row\":\"%s\",\"status\":\"rejected\",\"reason\":\"odd\",\"detail\":\"%s is\"}\\n' \"$digest\" $id >&$CUDA_AGENT_EVENTS_FD\n    \
        continue\n  fi");
    sandbox
        .write("p.yaml", "name: p\nstages:\n  squares: { uses: my/square, inputs: { rows: { path: ids.parquet } } }\n");
    write_ids(&sandbox.path("ids.parquet"), &(0..12).collect::<Vec<_>>(), "x");
    sandbox
}

#[test]
fn rejected_rows_are_counted_wherever_their_stage_is_told_of() {
    let sandbox = sandbox();
    let run = || {
        let output = sandbox.output(&["run", "p.yaml"]);
        assert!(output.status.success());
        let text = sandbox.stable(&String::from_utf8_lossy(&output.stderr));
        text.lines().filter(|line| line.contains("rejected")).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!("run", run());
    insta::assert_snapshot!("hit", run());
    for command in ["status", "runs"] {
        let text = sandbox.good(&[command]);
        assert!(text.contains("6 rejected") || text.contains("6 rows rejected"), "{command}: {text}");
    }
    let explained = sandbox.good(&["explain", "squares"]);
    insta::assert_snapshot!("explain", explained.lines().find(|line| line.contains("rejected")).unwrap_or(&explained));
    insta::assert_snapshot!("show", sandbox.good(&["show", "squares", "--rejected", "-n", "2"]));
    let shown: serde_json::Value =
        serde_json::from_str(&sandbox.good(&["show", "squares", "--rejected", "--json"])).unwrap();
    assert_eq!(shown.as_array().unwrap().len(), 6);
    assert_eq!(shown[2], serde_json::json!({ "row": 5, "values": { "id": 5 }, "why": "odd: 5 is" }));
    let runs: serde_json::Value = serde_json::from_str(&sandbox.good(&["runs", "--json"])).unwrap();
    assert_eq!((runs[0]["rejected_rows"].as_u64(), runs[1]["rejected_rows"].as_u64()), (Some(6), Some(6)));
}

#[test]
fn rejected_rows_of_a_stage_that_failed_of_them_can_be_seen() {
    let sandbox = sandbox();
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    sandbox.write("p.yaml", &text.replace("inputs:", "max_rejected: 2, inputs:"));
    let told = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(told.contains("6 rows are rejected, and `max_rejected` is 2"), "{told}");
    assert!(sandbox.good(&["show", "squares", "--rejected"]).contains("6 of 12 rows are rejected"));
    let told = sandbox.bad(2, &["show", "nothing", "--rejected"]);
    assert!(told.contains("there is no stage `nothing`"), "{told}");
}
