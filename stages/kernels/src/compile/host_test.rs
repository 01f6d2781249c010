//! What the compiler says of candidates that are wrong, and of those that this device cannot run.

use tempfile::TempDir;

use super::*;

const HEADER: &str =
    "#pragma once\n#define TASK_PARAMETERS const float* x, float* out\n#define TASK_ARGUMENTS x, out\n";

pub(crate) fn toolchain() -> HostToolchain {
    let here = std::env::current_exe().expect("a test has a program");
    HostToolchain::find(&here.with_file_name("cpu-runtimes")).expect("the tests need g++")
}

fn build_as(format: Format, source: &str) -> Result<Built, CompileFailure> {
    let folder = TempDir::new().expect("a folder");
    let candidate = Candidate { format, source: source.to_owned(), name: "test".to_owned() };
    toolchain().build(&candidate, HEADER, folder.path()).expect("the toolchain works")
}

fn source_errors(source: &str) -> Vec<Diagnostic> {
    match build_as(Format::Kernel, source) {
        Err(CompileFailure::Source(diagnostics)) => diagnostics,
        other => panic!("{other:?}"),
    }
}

fn unsupported(source: &str) -> Diagnostic {
    match build_as(Format::Kernel, source) {
        Err(CompileFailure::Unsupported(diagnostic)) => diagnostic,
        other => panic!("{other:?}"),
    }
}

fn shown(diagnostics: &[Diagnostic]) -> Vec<String> {
    let number = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    diagnostics.iter().map(|d| format!("{}:{} {}", number(d.line), number(d.column), d.message)).collect()
}

#[test]
fn errors_stand_at_the_candidates_lines() {
    let errors = source_errors(
        "#include \"task.h\"\n__global__ void k(const float* x, float* out) {\n    __shared__ float s[4];\n    out[0] = y;\n    int z = \"a\";\n}\nTASK_LAUNCH(k, 1, 1)\n",
    );
    assert_eq!(
        shown(&errors),
        [
            "4:14 'y' was not declared in this scope",
            "5:13 invalid conversion from 'const char*' to 'int' [-fpermissive]"
        ]
    );
}

#[test]
fn an_error_in_a_header_stands_where_it_was_brought_in() {
    let errors = source_errors(
        "#include \"task.h\"\nstruct Big { int a[4]; };\n__global__ void k(const float* x, float* out) {\n    Big b = {};\n    __match_any_sync(1, b);\n    cuda_cpu::exchange(0, 1, b, 0, 32);\n}\nTASK_LAUNCH(k, 1, 1)\n",
    );
    assert_eq!(shown(&errors), ["6:23 a warp exchanges values of at most eight bytes"]);
}

#[test]
fn a_kernel_must_take_the_tasks_tensors() {
    let with = |parameters: &str| {
        format!("#include \"task.h\"\n__global__ void k({parameters}) {{}}\n\nTASK_LAUNCH(k, 1, 1)\n")
    };
    let errors = source_errors(&with("const float* x, int* out"));
    for wrong in ["float* out, const float* x", "const float* x", "const float* x, float* out, int n"] {
        assert_eq!(source_errors(&with(wrong))[0], errors[0], "{wrong}");
    }
    for right in ["float* x, float* out", "const float* x, float* out, char* scratch"] {
        assert!(build_as(Format::Kernel, &with(right)).is_ok(), "{right}");
    }
    assert_eq!(shown(&errors), ["4:1 k must take (const float* x, float* out) and may take a scratch pointer"]);
}

#[test]
fn a_candidate_must_launch_something() {
    assert_eq!(
        shown(&source_errors("#include \"task.h\"\n")),
        ["-:- there is no TASK_LAUNCH(kernel, grid, block): nothing would run"]
    );
    let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, "#include \"task.h\"\n") else {
        panic!("it compiles")
    };
    assert_eq!(shown(&errors), ["-:- 'launch' was not declared in this scope"]);
}

#[test]
fn too_much_static_shared_memory_is_an_error() {
    let errors = source_errors(
        "#include \"task.h\"\n__global__ void k(const float* x, float* out) {\n    __shared__ float s[20000];\n    out[0] = s[0];\n}\nTASK_LAUNCH(k, 1, 1)\n",
    );
    assert_eq!(shown(&errors), ["3:- too much static shared memory: a block has 48 KiB"]);
}

#[test]
fn what_this_device_lacks_is_unsupported() {
    let kernel = |body: &str| {
        format!(
            "#include \"task.h\"\n__global__ void k(const float* x, float* out) {{\n    {body}\n}}\nTASK_LAUNCH(k, 1, 1)\n"
        )
    };
    let found = [
        unsupported(&kernel("asm volatile(\"cp.async.wait_all;\" ::: \"memory\");")),
        unsupported(&kernel("float f; asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(f) : \"f\"(1.0f));")),
        unsupported(&kernel("out[0] = tex1Dfetch<float>(0, 1);")),
        unsupported(&kernel("out[0] = __vadd4(1, 2);")),
        unsupported(&format!("#include <mma.h>\n{}", kernel(""))),
        unsupported(&format!("#include <cooperative_groups.h>\n{}", kernel(""))),
        unsupported(&format!("\n#include <cub/cub.cuh>\n{}", kernel(""))),
    ];
    assert_eq!(
        shown(&found),
        [
            "3:- the CPU device does not support inline PTX",
            "3:- the CPU device does not support inline PTX",
            "3:14 the CPU device does not support `tex1Dfetch`",
            "3:14 the CPU device does not support `__vadd4`",
            "1:10 the CPU device does not support the header mma.h",
            "1:10 the CPU device does not support the header cooperative_groups.h",
            "2:10 the CPU device does not support the header cub/cub.cuh",
        ]
    );
}

#[test]
fn every_embedded_file_is_listed() {
    fn files(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() { files(&entry, found) } else { found.push(entry) }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cpu");
    let mut found = Vec::new();
    files(&root, &mut found);
    let mut names = found.iter().map(|path| path.strip_prefix(&root).unwrap().to_str().unwrap()).collect::<Vec<_>>();
    names.sort_unstable();
    assert_eq!(names, FILES.iter().map(|(path, _)| *path).collect::<Vec<_>>());
}
