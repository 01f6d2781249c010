//! Embeds the kinds' manifests and identities.

fn main() {
    cuda_agent_builtin::build_script();
    // Sources of agent/rollout from another crate's folder, which is not looked at otherwise.
    println!("cargo::rerun-if-changed=../kernels");
}
