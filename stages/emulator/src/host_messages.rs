//! What g++ says of a candidate for the CPU device, in words that speak of the candidate and not of the device's workings.

use std::collections::HashSet;

use cuda_agent_sandbox::audit;
use cuda_agent_sandbox::diagnostic::{CompileFailure, Diagnostic, MOST, cut, without_header};
use cuda_agent_sandbox::names::line_of_word;
use cuda_agent_sandbox::process::Ended;

use crate::SOURCE_NAME;

/// The words of the GPU's path where g++ speaks of the header's workings.
pub fn in_plain_words(failure: CompileFailure, source: &str) -> CompileFailure {
    let CompileFailure::Source(mut found) = failure else { return failure };
    for error in &mut found {
        let line = error.line.and_then(|line| source.lines().nth(line.checked_sub(1)? as usize)).unwrap_or_default();
        let of_a_macro = line.contains("TASK_LAUNCH") || line.contains("TASK_SCRATCH");
        if error.message.contains("redefinition of") && error.message.contains(" task_launch_") {
            "each TASK_LAUNCH needs a line of its own".clone_into(&mut error.message);
        } else if of_a_macro && error.message == "expected unqualified-id before string constant" {
            "this must stand at file scope: is a closing brace missing before it?".clone_into(&mut error.message);
        } else if error.message.starts_with("launch must be ") {
            error.line = line_of_word(source, "launch");
        }
    }
    CompileFailure::Source(without_header(found, source))
}

/// What a compiler's end says of the candidate.
pub fn judge(ended: Ended) -> Result<(), CompileFailure> {
    match ended {
        Ended::Well(_) => Ok(()),
        Ended::Limit(reason) => Err(CompileFailure::Limit(reason)),
        Ended::Badly(messages) => Err(failure(&messages)),
    }
}

/// Errors at the candidate's lines. One that names what only the CPU device lacks makes the candidate unsupported.
fn failure(messages: &str) -> CompileFailure {
    let mut diagnostics = diagnostics(messages);
    for diagnostic in &mut diagnostics {
        let unknown = unknown_name(&diagnostic.message);
        if let Some(own) = unknown.filter(|name| ["cuda_cpu", "CUDA_CPU"].iter().any(|part| name.starts_with(part))) {
            diagnostic.message = format!("{own} is refused: a candidate can't use what is the CPU device's own");
        } else if let Some(refusal) = unknown.and_then(audit::refusal_of_cuda) {
            diagnostic.message = refusal;
        } else if let Some(missing) = missing_on_this_device(&diagnostic.message) {
            let message = format!("the CPU device does not support {missing}");
            return CompileFailure::Unsupported(Diagnostic { message, ..diagnostic.clone() });
        }
    }
    let mut told = HashSet::new();
    // A second error of one line mostly comes of the first.
    diagnostics.retain(|diagnostic| told.insert(diagnostic.line));
    diagnostics.truncate(MOST);
    diagnostics.iter_mut().for_each(|diagnostic| diagnostic.message = cut(&diagnostic.message));
    if diagnostics.is_empty() {
        let message = cut(messages.lines().next().unwrap_or("g++ failed without a message"));
        diagnostics.push(Diagnostic { line: None, column: None, message });
    }
    CompileFailure::Source(diagnostics)
}

/// Where a message stands.
pub struct Place {
    /// Counted from one.
    pub line: u32,
    column: Option<u32>,
}

/// Errors in the order in which g++ found them. One inside a header is put where the candidate brought it in.
fn diagnostics(messages: &str) -> Vec<Diagnostic> {
    let mut found: Vec<Diagnostic> = Vec::new();
    let mut brought_in: Option<Place> = None;
    for line in messages.lines() {
        let own = place(line);
        if let Some((_, message)) = line.split_once("error: ") {
            let inherited = brought_in.take();
            let place = own.or(inherited);
            let (line, column) = place.map_or((None, None), |place| (Some(place.line), place.column));
            let message = message.trim().trim_start_matches("static assertion failed: ").to_owned();
            found.push(Diagnostic { line, column, message });
        } else if let Some(undefined) = line.split_once("undefined reference to ") {
            let line = own.map(|place| place.line);
            found.push(Diagnostic { line, column: None, message: format!("undefined reference to {}", undefined.1) });
        } else if own.is_some() && (line.contains("required from") || line.starts_with("In file included from")) {
            brought_in = own;
        } else if let (Some(own), Some(last)) = (own, found.last_mut().filter(|last| last.line.is_none())) {
            (last.line, last.column) = (Some(own.line), own.column);
        }
    }
    // What stands nowhere in the candidate comes of one mistake: the host function is missing or takes something else.
    let mut nowhere = 0;
    found.retain(|diagnostic| {
        nowhere += usize::from(diagnostic.line.is_none());
        diagnostic.line.is_some() || nowhere == 1
    });
    found
}

/// The first place in the candidate that a message names.
fn place(line: &str) -> Option<Place> {
    let at = line.find(SOURCE_NAME)? + SOURCE_NAME.len();
    let mut numbers = line[at..].strip_prefix(':')?.split(|c: char| !c.is_ascii_digit());
    Some(Place { line: numbers.next()?.parse().ok()?, column: numbers.next().and_then(|column| column.parse().ok()) })
}

/// What an error lacks, if it is CUDA's and not the candidate's.
fn missing_on_this_device(message: &str) -> Option<String> {
    if let Some((_, what)) = message.split_once("cuda-cpu-unsupported: ") {
        return Some(what.trim_end_matches('"').to_owned());
    }
    if let Some(header) = message.strip_suffix(": No such file or directory") {
        return belongs_to_cuda(header).then(|| format!("the header {header}"));
    }
    let name = unknown_name(message)?;
    let lacks =
        belongs_to_cuda(name) || ["__tsan_", "__atomic_", "__ubsan_"].iter().any(|prefix| name.starts_with(prefix));
    lacks.then(|| format!("`{name}`"))
}

/// The name that a message is about because nothing has it.
fn unknown_name(message: &str) -> Option<&str> {
    let unknown = [
        "was not declared",
        "does not name a type",
        "has not been declared",
        "undefined reference",
        "is not a member of",
    ];
    if !unknown.iter().any(|phrase| message.contains(phrase)) {
        return None;
    }
    message.split(['‘', '\'', '`']).nth(1)?.split(['’', '\'', '(']).next()
}

/// Whether a name or a header looks like CUDA's own.
fn belongs_to_cuda(name: &str) -> bool {
    const PREFIXES: &[&str] = &[
        "cuda",
        "cub",
        "curand",
        "cufft",
        "cusparse",
        "cusolver",
        "cudnn",
        "cutlass",
        "cute/",
        "cooperative_groups",
        "cg",
        "thrust",
        "nvcuda",
        "nv/",
        "nvrtc",
        "mma",
        "wmma",
        "tex1D",
        "tex2D",
        "tex3D",
        "texture",
        "surf",
        "atomic",
        "__nv_",
        "crt/",
        "sm_",
        "cp_async",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || is_intrinsic(name)
}

/// `__vadd4`, `__hcmadd`: two underscores and a small letter, as CUDA's intrinsics and few candidates have them.
fn is_intrinsic(name: &str) -> bool {
    name.strip_prefix("__").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()))
}
