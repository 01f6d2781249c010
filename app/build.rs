//! Links the program at a fixed address on Linux with glibc. Position-independent, it has 60,000 relocations, which the
//! loader works out page by page in each process; and the engine starts one for each program that it supervises. An
//! executed stage costs a third less without them. Libraries, heap and stack lie at random addresses as before.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |part: &str| std::env::var(format!("CARGO_CFG_TARGET_{part}")).unwrap_or_default();
    if target("OS") == "linux" && target("ENV") == "gnu" {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
}
