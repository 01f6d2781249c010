//! Embeds the kinds' manifests and identities, and links libtorch with CUDA where the program is built.

use std::env;

fn main() {
    cuda_agent_builtin::build_script();
    if env::var_os("CARGO_FEATURE_TORCH").is_some() {
        // The linker drops libraries that nothing refers to by name, and torch then says that there is no CUDA.
        println!("cargo::rustc-link-arg-bins=-Wl,--no-as-needed");
        println!("cargo::rustc-link-arg-bins=-ltorch_cuda");
        // Where the program was built it finds libtorch by itself; elsewhere LD_LIBRARY_PATH says where it is.
        if let Some(libraries) = env::var_os("DEP_TCH_LIBTORCH_LIB") {
            println!("cargo::rustc-link-arg=-Wl,-rpath,{}", libraries.to_string_lossy());
        }
    }
}
