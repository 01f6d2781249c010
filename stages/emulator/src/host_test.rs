//! What the compiler says of candidates that are wrong, and of those that this device cannot run.

use tempfile::TempDir;

use super::*;

const HEADER: &str =
    "#pragma once\n#define TASK_PARAMETERS const float* x, float* out\n#define TASK_ARGUMENTS x, out\n";

pub(crate) fn toolchain() -> HostToolchain {
    let here = std::env::current_exe().expect("a test has a program");
    HostToolchain::find(&here.with_file_name("cpu-runtimes")).expect("the tests need g++")
}

fn build_as(format: Format, source: &str) -> Result<Programs, CompileFailure> {
    build_with(format, source, HEADER)
}

fn build_with(format: Format, source: &str, header: &str) -> Result<Programs, CompileFailure> {
    let folder = TempDir::new().expect("a folder");
    let candidate = Candidate { format, source: source.to_owned(), name: "test".to_owned() };
    toolchain().build(&candidate, header, folder.path()).expect("the toolchain works")
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
        "#include \"task.h\"\nstruct Big { int a[4]; };\n__global__ void k(const float* x, float* out) {\n    Big b = {};\n    __match_any_sync(1, b);\n    __stcg(out, b);\n}\nTASK_LAUNCH(k, 1, 1)\n",
    );
    assert_eq!(shown(&errors), ["6:11 cannot convert 'Big' to 'float' in assignment"]);
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
    assert_eq!(
        shown(&errors),
        ["4:1 k must take (const float* x, float* out) and may take a scratch pointer after them"]
    );
}

#[test]
fn what_reaches_out_of_the_program_is_refused() {
    let kernel = "#include \"task.h\"\nextern \"C\" int system(const char*);\n__global__ void k(TASK_PARAMETERS) {\n    system(\"true\");\n}\nTASK_LAUNCH(k, 1, 1)\n";
    assert_eq!(shown(&source_errors(kernel)), ["2:- system is refused: it is no function of the GPU"]);
    // Neither program can be told from the other, or from one that nothing watches.
    for name in ["__SANITIZE_THREAD__", "__SANITIZE_ADDRESS__"] {
        let hidden =
            kernel.replace("    system", &format!("#ifdef {name}\n    system")).replace(";\n}", ";\n#endif\n}");
        assert!(build_as(Format::Kernel, &hidden).is_ok(), "{name}");
    }
    let launch = "#include <unistd.h>\n#include \"task.h\"\nextern \"C\" cudaError_t launch(TASK_PARAMETERS, void*, cudaStream_t) {\n    return fork() ? cudaSuccess : cudaErrorUnknown;\n}\n";
    let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, launch) else { panic!("it forks") };
    let reason = "a launch candidate starts kernels and does nothing else on the host";
    assert_eq!(shown(&errors), [format!("4:- fork is refused: {reason}")]);
}

/// A source with this text before its kernel, in both formats.
fn with_kernel(before: &str, body: &str) -> [(Format, String); 2] {
    let kernel = |own: &str| {
        format!("#include \"task.h\"\n{before}\n{own}__global__ void k(TASK_PARAMETERS) {{\n    {body}\n}}\n")
    };
    let launch = "extern \"C\" cudaError_t launch(TASK_PARAMETERS, void*, cudaStream_t) {\n    k<<<1, 32>>>(x, out);\n    return cudaSuccess;\n}\n";
    [(Format::Kernel, kernel("") + "TASK_LAUNCH(k, 1, 32)\n"), (Format::Launch, kernel("static ") + launch)]
}

#[test]
fn a_source_neither_switches_off_nor_reaches_its_checks() {
    let paste = "#define CAT_(a, b) a##b\n#define CAT(a, b) CAT_(a, b)";
    let cases = [
        ("__attribute__((no_sanitize(\"address\")))", ""),
        ("#define OFF __no_##sanitize__\n__attribute__((OFF(\"thread\")))", ""),
        (&*format!("{paste}\n[[gnu::CAT(no_sani, tize_thread)]]"), ""),
        ("__attribute__((no_\\\nsanitize_address))", ""),
        ("_Pragma(\"GCC optimize(\\\"O3\\\")\")", ""),
        ("#include <sanitizer/asan_interface.h>", "__asan_unpoison_memory_region(out, 4096);"),
        ("extern \"C\" void __tsan_acquire(void*);", "__tsan_acquire(out);"),
        ("extern \"C\" void __tsan_read4(void*) {}", ""),
        (&*format!("{paste}\nextern \"C\" void CAT(__as, an_report_load4)(void*) {{}}"), ""),
        ("extern \"C\" long write(int, const void*, unsigned long n) { return n; }", ""),
        ("extern \"C\" int main(int, char**) { return 0; }", ""),
        (
            &*format!("{paste}\nextern \"C\" void CAT(cuda_, cpu_fill)(void*, int, unsigned long long);"),
            "cuda_cpu_fill(out, 0, 4);",
        ),
        ("", "cuda_cpu::atomic_update(out, [](float v) { return v; });"),
        ("", "CUDA_CPU_LAUNCH_4(k, 1, 1, 0);"),
        ("__attribute__((section(\"cuda_cpu_launches\"))) int forged[26];", ""),
        (paste, "CAT(as, m)(\"nop\");"),
        ("#define m_ __asm\\\n__", "m_ volatile(\"nop\");"),
        ("void (*f)() = [] { asm(\"syscall\"); };", ""),
    ];
    let told = cases.iter().flat_map(|(before, body)| {
        with_kernel(before, body).map(|(format, source)| match build_as(format, &source) {
            Ok(_) => format!("ACCEPTED {before} {body}"),
            Err(CompileFailure::Source(all)) => shown(&all).join("\n  "),
            Err(CompileFailure::Unsupported(one)) => format!("unsupported {}", shown(&[one]).join("")),
            Err(other) => format!("{other:?}"),
        })
    });
    insta::assert_snapshot!(told.collect::<Vec<_>>().join("\n"));
}

#[test]
fn honest_sources_that_look_like_tricks_are_built() {
    let cases = [
        ("// asm volatile no_sanitize __tsan_read4\nconst char* text = \"asm(no_sanitize) __asan_load4\";", ""),
        (
            "__device__ float asm_like(float section) { int target = 1, copy = target; return section * copy; }",
            "out[0] = asm_like(x[0]);",
        ),
        ("#if defined(__SANITIZE_ADDRESS__) || defined(__has_feature)\n#define WATCHED 1\n#endif", ""),
        (
            "#include <vector>\n#include <string>\n#include <algorithm>\n#include <cstdio>",
            "#pragma unroll 4\n    for (int i = 0; i < 4; i++) out[i] = 0;",
        ),
        ("#include <vector>\nstd::vector<void*> all;\nvoid* grow() { all.push_back(&all); return all[0]; }", ""),
        (
            "struct __attribute__((aligned(16))) Four { float v[4]; };\n[[nodiscard]] __device__ __attribute__((noinline)) float f() { return 1; }",
            "out[0] = f();",
        ),
        ("extern \"C\" __device__ float step(float v) { return v > 0; }", "out[0] = step(x[0]); atomicAdd(out, 1.0f);"),
    ];
    for (before, body) in cases {
        for (format, source) in with_kernel(before, body) {
            let built = build_as(format, &source);
            let needs_host = before.contains("grow") && format == Format::Kernel;
            assert!(built.is_ok() || needs_host, "{source}: {built:?}");
        }
    }
}

#[test]
fn a_damaged_runtime_is_made_anew() {
    let kept = TempDir::new().expect("a folder");
    let built = |toolchain: HostToolchain| {
        let folder = TempDir::new().expect("a folder");
        let source = "#include \"task.h\"\n__global__ void k(TASK_PARAMETERS) {}\nTASK_LAUNCH(k, 1, 1)\n";
        let candidate = Candidate { format: Format::Kernel, source: source.to_owned(), name: "test".to_owned() };
        toolchain.build(&candidate, HEADER, folder.path()).expect("the toolchain works").expect("it compiles")
    };
    built(HostToolchain::find(kept.path()).expect("a compiler"));
    let runtime = fs::read_dir(kept.path()).expect("it is there").next().expect("one").expect("readable").path();
    for name in ["include/cuda_cpu.h", "memory.o"] {
        fs::write(runtime.join(name), "").expect("writable");
        built(HostToolchain::find(kept.path()).expect("a compiler"));
        assert!(is_whole(&runtime));
    }
    assert_eq!(fs::read_dir(kept.path()).expect("it is there").count(), 1);
}

#[test]
fn what_is_refused_on_a_gpu_is_not_merely_lacking() {
    let source = "#include \"task.h\"\nextern \"C\" cudaError_t launch(TASK_PARAMETERS, void*, cudaStream_t) {\n    void* p;\n    return cudaMalloc(&p, 4);\n}\n";
    let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, source) else { panic!("it allocates") };
    assert_eq!(shown(&errors), ["4:12 cudaMalloc is refused: memory comes from TASK_SCRATCH(bytes)"]);
    let copy = source.replace("cudaMalloc(&p, 4)", "cudaMemcpy(p, out, 4, cudaMemcpyDefault)");
    let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, &copy) else { panic!("it copies at once") };
    let reason = "copies and fills end in Async and name the stream that launch is given";
    assert_eq!(shown(&errors), [format!("4:12 cudaMemcpy is refused: {reason}")]);
    // What a GPU offers and this device doesn't stays that.
    let wide = source.replace("cudaMalloc(&p, 4)", "cudaMemcpy2DAsync(p, 4, out, 4, 4, 1, cudaMemcpyDefault, 0)");
    let Err(CompileFailure::Unsupported(lacking)) = build_as(Format::Launch, &wide) else { panic!("it is there") };
    assert_eq!(lacking.message, "the CPU device does not support `cudaMemcpy2DAsync`");
}

#[test]
fn a_message_of_a_megabyte_is_cut() {
    let source = "#include \"task.h\"\ntemplate <class A, class B> struct P {};\ntemplate <int n> struct F { typedef P<typename F<n - 1>::t, typename F<n - 1>::t> t; };\ntemplate <> struct F<0> { typedef int t; };\n__global__ void k(TASK_PARAMETERS) { F<14>::t z = 3; }\nTASK_LAUNCH(k, 1, 1)\n";
    let errors = source_errors(source);
    assert!(errors[0].message.chars().count() <= 401, "{}", errors[0].message.len());
}

#[test]
fn a_candidate_must_launch_something() {
    let nothing = "nothing is launched: add TASK_LAUNCH(kernel, grid, block) at file scope";
    assert_eq!(shown(&source_errors("#include \"task.h\"\n")), [format!("-:- {nothing}")]);
    let idle = "#include \"task.h\"\n\n__global__ void k(const float* x, float* out) {}\n";
    assert_eq!(shown(&source_errors(idle)), [format!("3:- {nothing}")]);
    assert_eq!(shown(&source_errors("")), ["1:- task.h is not included".to_owned(), format!("-:- {nothing}")]);
    let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, "#include \"task.h\"\n") else {
        panic!("it compiles")
    };
    let prototype = "extern \"C\" cudaError_t launch(const float* x, float* out, void* scratch, cudaStream_t stream)";
    assert_eq!(shown(&errors), [format!("-:- there is no function launch: {prototype}")]);
    for parameters in ["float* x, float* out, void* s, cudaStream_t t", "TASK_PARAMETERS, void* s"] {
        let source =
            format!("#include \"task.h\"\nextern \"C\" cudaError_t launch({parameters}) {{ return cudaSuccess; }}\n");
        let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, &source) else { panic!("{parameters}") };
        assert_eq!(shown(&errors), [format!("2:- launch must be {prototype}")]);
    }
}

const ELEMENTS: &str = "#pragma once\n#define TASK_PARAMETERS const long long* x, const bool* mask, signed char* out\n#define TASK_ARGUMENTS x, mask, out\n";

/// The rule of `element_fits` in `headers/task_machinery.h`.
#[test]
fn elements_go_by_the_names_that_the_gpu_takes() {
    let with = |parameters: &str| {
        let source = format!("#include \"task.h\"\n__global__ void k({parameters}) {{}}\nTASK_LAUNCH(k, 1, 1)\n");
        build_with(Format::Kernel, &source, ELEMENTS)
    };
    for right in [
        "const int64_t* x, const unsigned char* mask, char* out",
        "int64_t* x, uint8_t* mask, int8_t* out, float* scratch",
        "TASK_PARAMETERS",
    ] {
        assert!(with(right).is_ok(), "{right}");
    }
    for wrong in [
        "const int* x, const bool* mask, char* out",
        "const unsigned long* x, const bool* mask, char* out",
        "const long long* x, const char* mask, char* out",
        "const long long* x, const bool* mask, unsigned char* out",
        "const long long* x, const bool* mask, const char* out",
    ] {
        let Err(CompileFailure::Source(errors)) = with(wrong) else { panic!("{wrong}") };
        assert!(errors.len() == 1 && errors[0].message.starts_with("k must take (const long long* x"), "{errors:?}");
    }
}

#[test]
fn launches_are_refused_as_on_the_gpu() {
    let said = |kernel: &str, launch: &str| {
        let source =
            format!("#include \"task.h\"\n{kernel} void k(const float* x, float* out) {{ out[0] = 0; }}\n{launch}\n");
        shown(&source_errors(&source)).join("; ")
    };
    let plain = |launch: &str| said("__global__", launch);
    let template = said("template <int n> __global__", "TASK_LAUNCH(k<250>, 1, 1)");
    let none = "3:- TASK_LAUNCH(k): there is no such kernel: it must be a plain, non-static __global__ function";
    assert_eq!(
        template,
        "3:1 TASK_LAUNCH(k<250>): a template can't be launched here: call it from a plain __global__ function"
    );
    assert_eq!(said("static __global__", "TASK_LAUNCH(k, 1, 1)"), none);
    assert_eq!(said("__device__", "TASK_LAUNCH(k, 1, 1)"), none);
    assert_eq!(
        said("namespace inner { __global__", "}\nusing namespace inner;\nTASK_LAUNCH(k, 1, 1)").get(1..),
        none.get(1..)
    );
    let grid = "3:1 TASK_LAUNCH(k): a grid has 1 to 2147483647 blocks in x, 1 to 65535 in y and in z";
    for wrong in ["0", "-1", "1LL << 32", "dim3(1, 65536)"] {
        assert_eq!(plain(&format!("TASK_LAUNCH(k, ({wrong}), 1)")), grid, "{wrong}");
    }
    let block = "3:1 TASK_LAUNCH(k): a block has 1 to 1024 threads, at most 64 of them in z";
    for wrong in ["2048", "dim3(32, 33)", "dim3(1, 1, 65)", "0"] {
        assert_eq!(plain(&format!("TASK_LAUNCH(k, 1, ({wrong}))")), block, "{wrong}");
    }
    let size = "3:1 TASK_LAUNCH(k): a grid or a block is an integer or a dim3";
    assert_eq!([plain("TASK_LAUNCH(k, 4.0, 1)"), plain("TASK_LAUNCH(k, 1, 32.5f)")], [size, size]);
    let shared = "3:1 TASK_LAUNCH(k): a block has at most 232448 bytes of shared memory";
    assert_eq!([plain("TASK_LAUNCH(k, 1, 1, 300000)"), plain("TASK_LAUNCH(k, 1, 1, -4)")], [shared, shared]);
    let count = "3:1 TASK_LAUNCH takes a kernel, a grid, a block, and perhaps bytes of shared memory";
    assert_eq!([plain("TASK_LAUNCH(k, 1)"), plain("TASK_LAUNCH(k)")], [count, count]);
    assert!(plain("TASK_LAUNCH(k, 1, 1) TASK_LAUNCH(k, 2, 1)").ends_with(" each TASK_LAUNCH needs a line of its own"));
    let brace = plain("void f() {\nTASK_LAUNCH(k, 1, 1)");
    assert!(brace.contains("4:1 this must stand at file scope: is a closing brace missing before it?"), "{brace}");
    assert_eq!(plain("TASK_LAUNCH(k, 1, 1)\nTASK_SCRATCH(-1)"), "4:1 TASK_SCRATCH takes a number of bytes");
}

#[test]
fn launches_keep_the_order_of_the_source_and_the_names_of_kernels() {
    let built = build_as(
        Format::Kernel,
        "#include \"task.h\"\nextern \"C\" __global__ void b(TASK_PARAMETERS) {}\nvoid __global__ __launch_bounds__(64) a(TASK_PARAMETERS);\n\
         constexpr dim3 grid(2, 3);\nTASK_LAUNCH(b, grid, dim3(8, 8))\nTASK_LAUNCH(a, 10LL / 3, 32u, 100 * 1024);\nTASK_LAUNCH(b, 1, 2)\n\
         __global__ void a(TASK_PARAMETERS) {}\nTASK_SCRATCH(16 * sizeof(float));\n",
    )
    .expect("it compiles");
    let launches = built.launches.iter().map(|l| (&*l.symbol, l.grid, l.block, l.shared_bytes)).collect::<Vec<_>>();
    let expected =
        [("b", [2, 3, 1], [8, 8, 1], 0), ("a", [3, 1, 1], [32, 1, 1], 102_400), ("b", [1, 1, 1], [2, 1, 1], 0)];
    assert_eq!((launches.as_slice(), built.scratch_bytes), (expected.as_slice(), 64));
}

#[test]
fn a_forgotten_header_and_a_foreign_macro_are_told() {
    let kernel = "__global__ void k(const float* x, float* out) {}\nTASK_LAUNCH(k, 1, 1)\n";
    assert_eq!(shown(&source_errors(kernel))[0], "1:- task.h is not included");
    let source = format!(
        "#include \"task.h\"\n{kernel}extern \"C\" cudaError_t launch(TASK_PARAMETERS, void* s, cudaStream_t t) {{ return cudaSuccess; }}\n"
    );
    let Err(CompileFailure::Source(errors)) = build_as(Format::Launch, &source) else { panic!("it compiles") };
    assert_eq!(shown(&errors), ["3:1 a launch candidate launches in its function launch, without TASK_LAUNCH"]);
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
    names.push("include/cuda_cpu/launch_limits.h");
    names.sort_unstable();
    assert_eq!(names, FILES.iter().map(|(path, _)| *path).collect::<Vec<_>>());
}
