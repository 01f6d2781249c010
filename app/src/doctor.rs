//! What `cuda-agent doctor` says of CUDA's headers and of the walls around candidates' programs.
//!
//! Of the headers: whether both compilers take those that a machine may have in part. Nothing is run: what is looked for is
//! a header that is missing, which shows when it is compiled. The walls are put up around a process that ends at once.

use std::path::Path;
use std::sync::Arc;

use cuda_agent_cli::{Finding, Machine};
use cuda_agent_kernels::candidate::{Candidate, Format};
use cuda_agent_kernels::compile::CompileFailure;
use cuda_agent_kernels::compile::cuda::{CudaCompiler, GpuTarget};
use cuda_agent_kernels::compile::recorder::GpuFacts;
use cuda_agent_kernels::compile::toolkit::{PARTS, Toolkit};
use cuda_agent_kernels::fault::EvaluatorError;
use cuda_agent_kernels::task::{DataType, TaskSpec, Tensor};
use cuda_agent_sandbox::child::walls::{self, Held};

/// Any that has tensor cores.
const ARCHITECTURE: &str = "sm_90";

/// All that is checked.
pub fn findings(machine: &Machine) -> Vec<Finding> {
    let mut found = headers(&machine.python, &machine.cache);
    found.push(match walls::probe() {
        Ok(held) => around_programs(held),
        Err(error) => {
            let message = format!("they can't be tried: {error}");
            Finding { name: WALLS, is_good: false, message, hint: None }
        }
    });
    found
}

const WALLS: &str = "walls";

/// What keeps a candidate's host code in, and what of it this system lacks.
fn around_programs(held: Held) -> Finding {
    let all = [
        (held.calls, "system calls (seccomp)", "a kernel with seccomp filters"),
        (held.files, "files (Landlock)", "Linux 5.13 or newer with Landlock among its security modules"),
        (held.namespaces, "the network (namespaces)", "root with CAP_SYS_ADMIN, or user namespaces for ordinary users"),
        (held.user, "a user without rights", "root that may change its user"),
    ];
    let named = |stands: bool| {
        let names = all.iter().filter(|wall| wall.0 == stands).map(|wall| wall.1).collect::<Vec<_>>();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let stands = named(true).map_or_else(
        || "nothing stands around what runs candidates' host code".to_owned(),
        |names| format!("around what runs candidates' host code stand: {names}"),
    );
    let Some(lacking) = named(false) else {
        return Finding { name: WALLS, is_good: true, message: stands, hint: None };
    };
    let needs = all.iter().filter(|wall| !wall.0).map(|wall| wall.2).collect::<Vec<_>>().join("; ");
    let message =
        format!("{stands}; this system lacks: {lacking}. Verdicts are the same, and hostile code reaches further");
    Finding { name: WALLS, is_good: false, message, hint: Some(format!("needed: {needs}")) }
}

/// Compiles a use of each part, with both compilers at a time.
fn headers(python: &Path, cache: &Path) -> Vec<Finding> {
    let toolkit = Toolkit::find_beside(python);
    let compilers = [
        ("nvrtc headers", Format::Kernel, toolkit.nvrtc().err()),
        ("nvcc headers", Format::Launch, toolkit.nvcc().err()),
    ];
    let compiler = CudaCompiler::new(toolkit, &cache.join("kernels").join("compiled"), compilers.len());
    let compiler = compiler.as_ref();
    let find = |(name, format, missing): (&'static str, Format, Option<EvaluatorError>)| match (compiler, missing) {
        // What to do about it is said beside the compiler.
        (_, Some(_)) => Finding { name, is_good: false, message: "not tried: no compiler".to_owned(), hint: None },
        (Ok(compiler), None) => finding(name, |parts| compile(compiler, format, parts)),
        (Err(error), None) => {
            Finding { name, is_good: false, message: error.message.clone(), hint: error.hint.clone() }
        }
    };
    let find = &find;
    std::thread::scope(|scope| {
        let all = compilers.map(|compiler| scope.spawn(move || find(compiler)));
        all.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

type Parts<'a> = &'a [(&'static str, &'static str, &'static str)];

/// All parts at once; each by itself only where that fails.
fn finding(name: &'static str, compile: impl Fn(Parts) -> Result<(), EvaluatorError>) -> Finding {
    let names = |parts: &[&str]| parts.join(", ");
    if compile(&PARTS).is_ok() {
        let all = PARTS.map(|(part, ..)| part);
        return Finding { name, is_good: true, message: format!("{} compile (not run)", names(&all)), hint: None };
    }
    let failed = PARTS.iter().filter_map(|part| Some((part.0, compile(std::slice::from_ref(part)).err()?)));
    let failed: Vec<(&str, EvaluatorError)> = failed.collect();
    let good: Vec<&str> =
        PARTS.iter().map(|part| part.0).filter(|part| failed.iter().all(|(name, _)| name != part)).collect();
    let told: Vec<String> = failed.iter().map(|(part, error)| format!("{part}: {}", error.message)).collect();
    let works = if good.is_empty() { String::new() } else { format!("; {} compile (not run)", names(&good)) };
    let hint = failed.iter().find_map(|(_, error)| error.hint.clone());
    Finding { name, is_good: false, message: told.join("; ") + &works, hint }
}

fn compile(compiler: &CudaCompiler, format: Format, parts: Parts) -> Result<(), EvaluatorError> {
    let candidate = Candidate { format, source: source(format, parts), name: "headers".to_owned() };
    // Nothing runs: whose figures these are makes no difference.
    let target = GpuTarget { architecture: ARCHITECTURE.to_owned(), facts: Arc::new(GpuFacts::of_an_h100()) };
    match compiler.compile(&candidate, &task(), &target)? {
        Ok(_) => Ok(()),
        Err(CompileFailure::Source(found)) => {
            let first = found.into_iter().next().map(|diagnostic| diagnostic.message);
            Err(EvaluatorError::new(first.unwrap_or_else(|| "it does not compile".to_owned())))
        }
        Err(CompileFailure::Unsupported(lacking)) => Err(EvaluatorError::new(lacking.message)),
        Err(CompileFailure::Fault(fault)) => Err(EvaluatorError::new(fault.message)),
        Err(CompileFailure::Limit(reason)) => Err(EvaluatorError::new(reason)),
    }
}

/// One kernel that uses all of them.
fn source(format: Format, parts: Parts) -> String {
    let includes: Vec<&str> = parts.iter().map(|(_, include, _)| *include).collect();
    let bodies: Vec<String> = parts.iter().map(|(_, _, body)| format!("{{\n{body}\n}}")).collect();
    let start = match format {
        Format::Kernel => "TASK_LAUNCH(k, 1, 32)\n",
        Format::Launch => {
            "extern \"C\" cudaError_t launch(TASK_PARAMETERS, void*, cudaStream_t stream) {\n\
             k<<<1, 32, 0, stream>>>(TASK_ARGUMENTS);\nreturn cudaGetLastError();\n}\n"
        }
    };
    format!(
        "#include \"task.h\"\n{}\n__global__ void k(TASK_PARAMETERS) {{\n{}\n}}\n{start}",
        includes.join("\n"),
        bodies.join("\n")
    )
}

fn task() -> TaskSpec {
    let tensor = |name: &str| Tensor { name: name.to_owned(), shape: vec![256], dtype: DataType::Float32 };
    TaskSpec {
        inputs: vec![tensor("x")],
        parameters: Vec::new(),
        buffers: Vec::new(),
        outputs: vec![tensor("out")],
        constants: Vec::new(),
        flops: 0,
        bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_named_beside_what_works() {
        let lacks_cub = |parts: Parts| match parts.iter().any(|(name, ..)| *name == "CUB") {
            true => Err(EvaluatorError::new("cub/cub.cuh is missing").with_hint("install it")),
            false => Ok(()),
        };
        let found = finding("nvcc headers", lacks_cub);
        assert_eq!((found.is_good, found.hint.as_deref()), (false, Some("install it")));
        assert_eq!(found.message, "CUB: cub/cub.cuh is missing; mma.h, cooperative groups compile (not run)");
        assert!(finding("nvcc headers", |_| Ok(())).is_good);
    }

    #[test]
    fn a_wall_that_a_system_lacks_is_named() {
        let all = Held { namespaces: true, files: true, user: true, calls: true };
        assert!(around_programs(all).is_good);
        let found = around_programs(Held { files: false, ..all });
        assert!(!found.is_good);
        assert!(found.message.contains("this system lacks: files (Landlock)."), "{}", found.message);
        assert!(found.hint.is_some_and(|hint| hint.contains("Linux 5.13")));
        let none = around_programs(Held::default()).message;
        assert!(none.starts_with("nothing stands"), "{none}");
    }
}
