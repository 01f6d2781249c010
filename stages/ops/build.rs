//! Embeds the kinds' manifests, the Python programs, and each kind's identity.

fn main() {
    cuda_agent_builtin::build_script();
}
