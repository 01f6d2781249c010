//! Candidates that reach the C library by other ways than names, so that nothing of it shows when they are compiled: what
//! they do then is refused by the walls, and the verdict says so.

use super::tests::{Arena, Task, build, faults, one_to_one, output, programs};
use super::*;
use cuda_agent_sandbox::candidate::Format;

/// Finds `syscall` by walking the loader's own tables.
const FIND: &str = r#"
#include "task.h"
#include <cstdlib>
#include <cstring>

struct Dynamic { long long tag; unsigned long long value; };
struct Library { unsigned long long base; const char* name; const Dynamic* dynamic; const Library* next; };
struct Loaded { int version; const Library* first; };
struct Symbol { unsigned name; unsigned char info, other; unsigned short section; unsigned long long value, bytes; };
typedef long (*Call)(long, ...);

static bool holds(const char* text, const char* part) {
    for (; *text; text++)
        if (!strncmp(text, part, strlen(part))) return true;
    return false;
}

static unsigned long long entry(const Dynamic* all, long long tag) {
    while (all->tag && all->tag != tag) all++;
    return all->value;
}

// The program lies where programs lie, and its dynamic section knows what else is loaded.
__attribute__((noinline)) static Call find(const char* wanted) {
    const char* program = (const char*)0x400000;
    auto headers = program + *(const unsigned long long*)(program + 32);
    const Dynamic* dynamic = nullptr;
    for (int i = 0; i < *(const unsigned short*)(program + 56); i++)
        if (*(const unsigned*)(headers + 56 * i) == 2) dynamic = *(const Dynamic* const*)(headers + 56 * i + 16);
    auto library = ((const Loaded*)entry(dynamic, 21))->first;
    while (!holds(library->name, "libc.so")) library = library->next;
    auto names = (const char*)entry(library->dynamic, 5);
    for (auto one = (const Symbol*)entry(library->dynamic, 6) + 1; (const char*)one < names; one++)
        if (!strcmp(names + one->name, wanted)) return (Call)(library->base + one->value);
    return nullptr;
}

__global__ void fill(float* out) { out[threadIdx.x] = 1.0f; }

extern "C" cudaError_t launch(TASK_PARAMETERS, void* scratch, cudaStream_t stream) {
    Call call = find("syscall");
    if (!call) return (cudaError_t)77;
    char room[256] = {};
    long result = ATTEMPT;
    if (result < 0) return (cudaError_t)55;
    fill<<<1, 32, 0, stream>>>(out);
    return cudaGetLastError();
}
"#;

fn task() -> Task {
    one_to_one(32, 32)
}

fn source(attempt: &str) -> String {
    FIND.replace("ATTEMPT", attempt)
}

/// The numbers are those of x86-64.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_candidate_that_finds_the_c_library_is_still_behind_walls() {
    // getpid: found, called, and nothing wrong with it.
    assert_eq!(
        output(Format::Launch, &source("call(39)"), &task()),
        [0x3f80_0000u32; 32].map(u32::to_le_bytes).concat()
    );
    let refused = [
        ("call(41, 2, 1, 0)", "socket"),
        ("call(57)", "fork"),
        ("call(59, \"/bin/true\", 0, 0)", "execve"),
        ("call(2, \"/tmp/x\", 65, 511)", "open"),
        // Its own data as code.
        ("call(10, (long)room & ~4095l, 4096, 5)", "mprotect"),
    ];
    let attempts = refused.map(|(attempt, name)| (attempt, FaultKind::Crash, format!("the system call {name}, which")));
    // What is read is refused to the caller.
    let read = [("call(2, \"/proc/self/maps\", 0)".to_owned(), FaultKind::Launch, "cudaError_t 55".to_owned())];
    let attempts = attempts.map(|(attempt, kind, says)| (attempt.to_owned(), kind, says)).into_iter().chain(read);
    for (attempt, kind, says) in attempts {
        for fault in faults(Format::Launch, &source(&attempt), &task()) {
            let fault = fault.unwrap_or_else(|| panic!("{attempt} is let through"));
            assert_eq!(fault.kind, kind, "{attempt}: {fault:?}");
            assert!(fault.message.contains(&says), "{attempt}: {fault:?}");
        }
    }
}

#[test]
fn each_start_is_a_process_of_its_own() {
    let source = r#"
#include "task.h"
__device__ float runs = 0;
__global__ void k(const float* x, float* out) { out[threadIdx.x] = threadIdx.x == 0 ? ++runs : 0.0f; }
TASK_LAUNCH(k, 1, 32)
"#;
    let task = task();
    let (_folder, built) = build(Format::Kernel, source, &task);
    let built = built.expect("it compiles");
    for program in programs(&built) {
        let arena = Arena::new(&task, 0);
        let start =
            || CpuRunner::start(program, arena.file.path(), arena.bytes, CpuLimits::default()).unwrap().unwrap();
        let mut runners = [start(), start()];
        assert_ne!(runners[0].process.id(), runners[1].process.id());
        for (run, runner) in [(1.0f32, 0), (2.0, 0), (1.0, 1), (3.0, 0)] {
            runners[runner].run(0, &arena.spans, arena.scratch, Duration::from_secs(30)).unwrap().unwrap();
            assert_eq!(arena.output()[..4], run.to_le_bytes(), "{}", program.display());
        }
    }
}

#[test]
fn managed_variables_are_plain_ones() {
    let source = r#"
#include "task.h"
__managed__ float kept[32];
__global__ void k(const float* x, float* out) { kept[threadIdx.x] = 1.0f; out[threadIdx.x] = kept[threadIdx.x]; }
TASK_LAUNCH(k, 1, 32)
"#;
    assert_eq!(output(Format::Kernel, source, &task()), [0x3f80_0000u32; 32].map(u32::to_le_bytes).concat());
}
