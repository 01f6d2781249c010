//! Embeds the kinds' manifests, the Python programs, and each kind's identity.

fn main() {
    cuda_agent_builtin::build_script();
    // Sources of ops/publish and ops/split from other crates' folders, which are not looked at otherwise.
    println!("cargo::rerun-if-changed=../kernels/profile/stage.yaml");
    println!("cargo::rerun-if-changed=../agent/prompts/example_operator.txt");
}
