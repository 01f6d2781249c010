//! Embeds the kinds' manifests and identities, and links libtorch with CUDA where the program is built.

use std::env;

fn main() {
    cuda_agent_builtin::build_script();
    if env::var_os("CARGO_FEATURE_TORCH").is_some() {
        // The linker drops libraries that nothing refers to by name, and torch then says that there is no CUDA.
        println!("cargo::rustc-link-arg-bins=-Wl,--no-as-needed");
        println!("cargo::rustc-link-arg-bins=-ltorch_cuda");
    }
}
