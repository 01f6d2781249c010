//! Embeds the kinds' manifests, the Python programs, and each kind's identity.

fn main() {
    cuda_agent_builtin::build_script();
    // A source of ops/publish from another crate's folder, which is not looked at otherwise.
    println!("cargo::rerun-if-changed=../kernels/profile/stage.yaml");
}
