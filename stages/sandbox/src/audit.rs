//! What a candidate's code may call.
//!
//! Every function of another library that a candidate's host code, or its device code on the CPU device, refers to is on a
//! written list, and there is no managed memory. That is for the message: it says by name, line and reason what can't work.
//! It is no wall: machine instructions that the candidate writes itself (`asm("syscall")`) are not seen. For a GPU, host
//! code runs where there is none (`recorder`), so that what it does counts for nothing but the work that it notes.

use crate::candidate::Format;
use crate::diagnostic::{Diagnostic, MOST};
use crate::names::{demangle, line_of_word};

/// What is wrong with the symbols that a candidate needs from outside, by lines, the first few.
pub fn refusals<'a>(needed: impl Iterator<Item = &'a str>, format: Format, source: &str) -> Vec<Diagnostic> {
    let mut faults: Vec<Diagnostic> = needed.filter_map(|symbol| refusal(symbol, format, source)).collect();
    faults.sort_by(|one, other| (one.line, &one.message).cmp(&(other.line, &other.message)));
    faults.dedup();
    faults.truncate(MOST);
    faults
}

fn refusal(symbol: &str, format: Format, source: &str) -> Option<Diagnostic> {
    if symbol.is_empty() || is_allowed(symbol) {
        return None;
    }
    let name = called(symbol);
    let message = match (format, reason(symbol)) {
        (Format::Kernel, _) => format!("{name} is refused: it is no function of the GPU"),
        (Format::Launch, Some(reason)) => format!("{name} is refused: {reason}"),
        (Format::Launch, None) => {
            format!("{name} is refused: it is not among the functions that a launch candidate may call")
        }
    };
    let word = name.trim_start_matches("std::");
    Some(Diagnostic { line: line_of_word(source, word), column: None, message })
}

/// As the source has it: a managed variable by its keyword, and everything of a standard class by the class.
fn called(symbol: &str) -> String {
    let name = demangle(symbol);
    match name.strip_prefix("std::").and_then(|rest| rest.split("::").next()) {
        Some(class) => format!("std::{}", class.trim_start_matches("basic_").trim_end_matches("<…>")),
        None if symbol == "__cudaRegisterManagedVar" => "__managed__".to_owned(),
        None => name,
    }
}

/// Why a symbol is refused: parts of names, and the reason for any that has one of them.
const REASONS: [(&str, &str); 7] = [
    ("Managed cudaMemPrefetch cudaMemAdvise", "managed memory can take a whole host's GPUs out of service"),
    ("Multicast", "NVLink multicast can take a whole host's GPUs out of service"),
    ("Ipc cudaMemPool cudaMemExport cudaMemImport cudaImport", "memory is not shared with other processes"),
    ("cudaMalloc cudaFree cudaHost", "memory comes from TASK_SCRATCH(bytes)"),
    (
        "cudaStreamCreate cudaStreamBegin cudaGraph cudaEvent cudaLaunchHostFunc cudaStreamAddCallback",
        "all work goes on the stream that launch is given",
    ),
    ("cudaMemcpy cudaMemset", "copies and fills end in Async and name the stream that launch is given"),
    ("cudaGetDriverEntryPoint dlopen dlsym dlmopen", "functions are called by their names"),
];

/// What of C and C++ reaches out of the program, likewise.
const REACHES_OUT: &str = "system popen fork clone exec posix_spawn socket connect ptrace syscall open pthread_ thread filesystem \
    fstream filebuf condition_variable mutex random_device future";

/// What is wrong with a name of CUDA's own that no candidate may use.
pub fn refusal_of_cuda(name: &str) -> Option<String> {
    let is_refused = name.starts_with("cuda") && !is_allowed(name);
    let reason = is_refused.then(|| known_reason(name)).flatten()?;
    Some(format!("{name} is refused: {reason}"))
}

fn known_reason(symbol: &str) -> Option<&'static str> {
    REASONS.iter().find(|(parts, _)| has_part(symbol, parts)).map(|(_, reason)| *reason)
}

fn reason(symbol: &str) -> Option<&'static str> {
    let reaches_out = || "a launch candidate starts kernels and does nothing else on the host";
    known_reason(symbol).or_else(|| has_part(symbol, REACHES_OUT).then(reaches_out))
}

fn has_part(symbol: &str, parts: &str) -> bool {
    parts.split_whitespace().any(|part| symbol.contains(part))
}

/// The whole list. The names of C and CUDA are exact; C++'s standard library is let in by its prefix, less what reaches out.
fn is_allowed(symbol: &str) -> bool {
    let listed = |list: &str| list.split_whitespace().any(|name| name == symbol);
    let standard =
        || STANDARD.split_whitespace().any(|prefix| symbol.starts_with(prefix)) && !has_part(symbol, REACHES_OUT);
    let lists = [TOOLCHAIN, C, RUNTIME, CPU_DEVICE];
    lists.into_iter().any(listed)
        || is_instrumentation(symbol)
        || is_arithmetic(symbol)
        || is_mathematics(symbol)
        || standard()
}

/// Prefixes of mangled names: what is in `std`, streams and strings by their short names, `new` and `delete`.
const STANDARD: &str = "_ZSt _ZNSt _ZNKSt _ZNSo _ZNSs _ZTISt _ZTVSt _ZTTSt _ZTVN10__cxxabiv1 _Znw _Zna _Zdl _Zda";

/// What compilers and their start-up code refer to by themselves.
const TOOLCHAIN: &str = "__gmon_start__ _ITM_deregisterTMCloneTable _ITM_registerTMCloneTable __cxa_finalize __cxa_atexit atexit \
    __cxa_guard_acquire __cxa_guard_release __cxa_guard_abort __cxa_allocate_exception __cxa_free_exception __cxa_throw \
    __cxa_begin_catch __cxa_end_catch __cxa_rethrow _ZTIi _ZTIPKc __cxa_pure_virtual __cxa_throw_bad_array_new_length __cxa_bad_cast \
    __dso_handle _GLOBAL_OFFSET_TABLE_ __gxx_personality_v0 _Unwind_Resume __stack_chk_fail __assert_fail \
    __cudaRegisterFatBinary __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterFunction __cudaRegisterVar \
    __cudaPushCallConfiguration __cudaPopCallConfiguration __cudaGetKernel __cudaLaunchKernel __cudaInitModule";

const C: &str = "memcpy memset memmove memcmp __memcpy_chk __memset_chk __memmove_chk strlen strcmp strncmp strcpy strncpy \
    malloc calloc realloc free aligned_alloc posix_memalign abort qsort bsearch rand srand rand_r \
    printf puts putchar snprintf sprintf fprintf fwrite fputs fputc fflush stdout stderr vsnprintf \
    __printf_chk __fprintf_chk __snprintf_chk __sprintf_chk";

const RUNTIME: &str = "cudaGetLastError cudaPeekAtLastError cudaGetErrorString cudaGetErrorName \
    cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel \
    cudaMemsetAsync cudaMemset2DAsync cudaMemset3DAsync cudaMemcpyAsync cudaMemcpy2DAsync cudaMemcpy3DAsync \
    cudaMemcpyToSymbolAsync cudaMemcpyFromSymbolAsync cudaGetSymbolAddress cudaGetSymbolSize \
    cudaFuncSetAttribute cudaFuncGetAttributes cudaFuncSetCacheConfig \
    cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags \
    cudaOccupancyMaxActiveClusters cudaOccupancyMaxPotentialClusterSize cudaOccupancyAvailableDynamicSMemPerBlock \
    cudaGetDevice cudaGetDeviceProperties cudaGetDeviceProperties_v2 cudaDeviceGetAttribute \
    cudaDeviceSynchronize cudaStreamSynchronize cudaDriverGetVersion cudaRuntimeGetVersion";

/// The CPU device's coordinates. Its functions have other names in each build (`host.rs`).
const CPU_DEVICE: &str = "threadIdx blockIdx blockDim gridDim";

/// What its checks call.
fn is_instrumentation(symbol: &str) -> bool {
    ["__asan_", "__tsan_", "__ubsan_handle_"].iter().any(|prefix| symbol.starts_with(prefix))
}

/// libgcc: operations that a processor lacks, named after the modes of their operands, as in `__truncsfhf2`.
fn is_arithmetic(symbol: &str) -> bool {
    const MODES: &str = "si di ti hf bf sf df tf xf hc sc dc xc tc";
    let name = symbol.trim_end_matches(|c: char| c.is_ascii_digit());
    name.starts_with("__") && MODES.split(' ').any(|mode| name.ends_with(mode))
}

/// libm: a function's name, perhaps with `f` or `l` for its type.
fn is_mathematics(symbol: &str) -> bool {
    const FUNCTIONS: &str = "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 exp10 expm1 fabs \
        fdim floor fma fmax fmin fmod frexp hypot ilogb j0 j1 jn ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround \
        modf nan nearbyint nextafter nexttoward pow remainder remquo rint round scalbln scalbn sin sincos sinh sqrt tan tanh tgamma trunc y0 y1 yn";
    let listed = |name: &str| FUNCTIONS.split_whitespace().any(|function| function == name);
    listed(symbol) || symbol.strip_suffix(['f', 'l']).is_some_and(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_lets_in_what_launching_needs() {
        for symbol in [
            "cudaLaunchKernel",
            "memcpy",
            "sqrtf",
            "fma",
            "_ZSt20__throw_length_errorPKc",
            "_Znwm",
            "__truncsfhf2",
            "__asan_load4",
            "_ZTIi",
        ] {
            assert!(is_allowed(symbol), "{symbol}");
        }
        for symbol in [
            "cudaMallocManaged",
            "__cudaRegisterManagedVar",
            "cuMulticastCreate",
            "cudaIpcOpenMemHandle",
            "system",
            "fork",
            "__libc_fork",
            "__errno_location",
            "execve",
            "dlopen",
            "socket",
            "ptrace",
            "getenv",
            "_ZNSt6thread15_M_start_threadE",
            "cudaMalloc",
        ] {
            assert!(!is_allowed(symbol), "{symbol}");
        }
    }

    #[test]
    fn a_refusal_names_the_symbol_its_line_and_the_reason() {
        let refused = refusal("cudaMallocManaged", Format::Launch, "int a;\n  cudaMallocManaged(&p, 4);\n").unwrap();
        assert_eq!(refused.line, Some(2));
        assert_eq!(
            refused.message,
            "cudaMallocManaged is refused: managed memory can take a whole host's GPUs out of service"
        );
        assert_eq!(refusal("__cudaRegisterManagedVar", Format::Launch, "__managed__ int a;").unwrap().line, Some(1));
        assert!(refusal("getenv", Format::Launch, "").unwrap().message.contains("not among"));
        assert!(refusal("getenv", Format::Kernel, "").unwrap().message.contains("no function of the GPU"));
    }
}
