//! From a compiler's log to what it says of the candidate: short, first error first.
//!
//! Four dialects: EDG's (NVRTC and nvcc's front end), GCC's with its assembler and linker, ptxas's, and the drivers' own.
//! Warnings, notes, quoted source and counts are dropped. An error inside a header is reported at the candidate's line that
//! brought it in, where the log says which that is.

use super::names::{demangle, line_of_word};
use super::resources;
use super::{Diagnostic, MOST, cut};

/// What compilers are told the candidate's file is called; messages of the log are recognised by it.
pub const SOURCE_NAME: &str = "candidate.cu";

/// Shared memory that a kernel can declare statically, in bytes.
const STATIC_SHARED_BYTES: u32 = 48 * 1024;

/// The errors of a log, of which there is always at least one: the compiler did refuse the source.
pub fn diagnostics(log: &str, source: &str) -> Vec<Diagnostic> {
    let lines: Vec<&str> = log.lines().collect();
    let mut found: Vec<Diagnostic> = Vec::new();
    let mut included_from = None;
    for (position, line) in lines.iter().enumerate() {
        included_from = including_line(line).or(included_from);
        let Some(error) = parse(line, &lines[position + 1..], source, included_from) else { continue };
        if !found.iter().any(|known| follows_from(known, &error)) {
            found.push(error);
        }
    }
    if found.len() > 1 {
        found.retain(|error| !is_only_an_end(&error.message));
    }
    if found.is_empty() {
        found.push(without_an_error(log));
    }
    found.truncate(MOST);
    found
}

/// A second error of one line mostly comes of the first.
fn follows_from(known: &Diagnostic, error: &Diagnostic) -> bool {
    known.line == error.line && (known.line.is_some() || known.message == error.message)
}

/// Where in a file something is said.
struct Place<'a> {
    file: &'a str,
    line: u32,
    column: Option<u32>,
}

fn parse(line: &str, rest: &[&str], source: &str, included_from: Option<u32>) -> Option<Diagnostic> {
    if let Some((place, message)) = edg(line) {
        return Some(edg_diagnostic(&place, message, rest, source));
    }
    if let Some((place, message)) = gcc(line) {
        return Some(located(&place, message, included_from));
    }
    if let Some(message) = line.strip_prefix("At end of source: error: ") {
        let last = u32::try_from(source.lines().count()).ok();
        return Some(Diagnostic { line: last, column: None, message: tidy(message) });
    }
    let message = unlocated(line)?;
    if let Some((_, symbol)) = message.split_once("Unresolved extern function ") {
        let name = demangle(symbol.trim_matches('\''));
        let message = format!("{name} is declared and called, but nowhere defined");
        return Some(Diagnostic { line: line_of_word(source, &name), column: None, message: tidy(&message) });
    }
    Some(Diagnostic { line: None, column: None, message: tidy(&message) })
}

/// `candidate.cu(4): error: …`, `header.h(4): catastrophic error: …`, `….h(4): error #20-D: …`.
fn edg(line: &str) -> Option<(Place<'_>, &str)> {
    let (head, rest) = line.split_once("): ")?;
    let (file, number) = head.rsplit_once('(')?;
    let place = Place { file, line: number.parse().ok()?, column: None };
    let rest = rest.strip_prefix("catastrophic ").unwrap_or(rest);
    let (kind, message) = rest.split_once(": ")?;
    let is_error = kind == "error" || kind.starts_with("error #");
    (is_error && !file.contains(' ')).then_some((place, message))
}

fn edg_diagnostic(place: &Place, message: &str, rest: &[&str], source: &str) -> Diagnostic {
    let mut message = message.to_owned();
    let (context, quoted) = edg_context(rest);
    for more in context.iter().filter(|more| !more.contains("detected during") && instantiation(more).is_none()) {
        message = format!("{message} {}", more.trim());
    }
    if is_candidate(place.file) {
        let column = quoted.and_then(|(text, caret)| column(place.line, text, caret, source));
        return Diagnostic { line: Some(place.line), column, message: tidy(&message) };
    }
    // The innermost place comes first, the candidate's own line last.
    let line = context.iter().rev().find_map(|more| instantiation(more));
    in_header(place, &message, line)
}

/// The lines between a message and the caret: what the message goes on with, then the quoted line and the caret's offset.
fn edg_context<'a>(rest: &[&'a str]) -> (Vec<&'a str>, Option<(&'a str, usize)>) {
    let Some(caret) = rest.iter().take(60).position(|line| line.trim() == "^") else { return (Vec::new(), None) };
    let before = &rest[..caret];
    if before.iter().any(|line| line.trim().is_empty() || edg(line).is_some()) {
        return (Vec::new(), None);
    }
    let offset = rest[caret].find('^').unwrap_or(0);
    match before.split_last() {
        Some((quoted, context)) => (context.to_vec(), Some((quoted, offset))),
        None => (Vec::new(), None),
    }
}

/// nvcc quotes preprocessed text: its caret is of use only where the line is as the candidate has it.
fn column(line: u32, quoted: &str, caret: usize, source: &str) -> Option<u32> {
    let own = source.lines().nth(line.checked_sub(1)? as usize)?;
    let same = quoted.strip_prefix("  ").is_some_and(|quoted| quoted.trim_end() == own.trim_end());
    same.then(|| u32::try_from(caret.saturating_sub(1)).ok()).flatten()
}

/// `instantiation of "…" at line 12 of candidate.cu`, or without the file where the error is in the same one.
fn instantiation(line: &str) -> Option<u32> {
    let (_, place) = line.split_once(" at line ")?;
    let (number, file) = place.split_once(" of ").unwrap_or((place, SOURCE_NAME));
    if is_candidate(file.trim().trim_matches('"')) { number.trim().parse().ok() } else { None }
}

/// `candidate.cu:2:10: fatal error: …`, `candidate.cu:4: Error: …` of the assembler.
fn gcc(line: &str) -> Option<(Place<'_>, &str)> {
    let marks = [": fatal error: ", ": error: ", ": Error: ", ": sorry, unimplemented: "];
    let (head, message) = marks.iter().find_map(|mark| line.split_once(mark))?;
    let mut parts = head.rsplitn(3, ':');
    let (last, middle, first) = (parts.next()?, parts.next(), parts.next());
    let number: u32 = last.trim().parse().ok()?;
    match (first, middle, middle.and_then(|middle| middle.parse().ok())) {
        (Some(file), _, Some(line)) => Some((Place { file, line, column: Some(number) }, message)),
        (None, Some(file), _) => Some((Place { file, line: number, column: None }, message)),
        _ => None,
    }
}

fn located(place: &Place, message: &str, included_from: Option<u32>) -> Diagnostic {
    if is_candidate(place.file) {
        return Diagnostic { line: Some(place.line), column: place.column, message: tidy(message) };
    }
    in_header(place, message, included_from)
}

fn in_header(place: &Place, message: &str, line: Option<u32>) -> Diagnostic {
    let file = place.file.rsplit('/').next().unwrap_or(place.file);
    let message = rewritten(message).unwrap_or_else(|| message.to_owned());
    Diagnostic { line, column: None, message: tidy(&format!("{file}({}): {message}", place.line)) }
}

/// `In file included from candidate.cu:3:` and the continuation `from candidate.cu:3,`.
fn including_line(line: &str) -> Option<u32> {
    let (head, place) = line.split_once("from ")?;
    let is_stack = head.trim().is_empty() || head.trim() == "In file included";
    let mut parts = place.trim_end_matches([',', ':']).split(':');
    let file = parts.next()?;
    (is_stack && is_candidate(file)).then(|| parts.next()?.parse().ok()).flatten()
}

/// What has no place in the source: ptxas, the linkers, the drivers.
fn unlocated(line: &str) -> Option<String> {
    if line.starts_with("ptxas") || line.starts_with("nvlink") || line.starts_with("nvcc") || line.starts_with("nvrtc")
    {
        return of_a_tool(line);
    }
    let (_, symbol) = line.split_once("undefined reference to ")?;
    Some(format!("undefined reference to {symbol}"))
}

/// `ptxas error   : …`, `ptxas fatal   : …`, `ptxas /tmp/x.ptx, line 29; error   : …`, `nvrtc: error: …`.
fn of_a_tool(line: &str) -> Option<String> {
    let (head, message) = line.split_once(": ")?;
    let (tool, kind) = (head.split([' ', ':']).next()?, head.trim());
    if kind == tool {
        return message.strip_prefix("error: ").map(|message| format!("{tool}: {message}"));
    }
    let is_error = kind.ends_with(" error") || kind.ends_with(" fatal");
    is_error.then(|| format!("{tool}: {}", message.trim()))
}

/// Says that there were errors, not which.
fn is_only_an_end(message: &str) -> bool {
    ["Ptx assembly aborted", "ld returned"].iter().any(|end| message.contains(end))
}

/// NVRTC refuses too much shared memory without a word; its statistics show it.
fn without_an_error(log: &str) -> Diagnostic {
    let message = match resources::greedy(log, STATIC_SHARED_BYTES) {
        Some((kernel, bytes)) => format!(
            "{kernel} uses too much static shared memory: {bytes} bytes, {STATIC_SHARED_BYTES} at most; `extern __shared__` \
             with the bytes in TASK_LAUNCH can have more"
        ),
        None => match log.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("ptxas info")) {
            Some(line) => line.to_owned(),
            None => "the compiler refused the source without a message".to_owned(),
        },
    };
    Diagnostic { line: None, column: None, message: tidy(&message) }
}

fn is_candidate(file: &str) -> bool {
    file.rsplit('/').next() == Some(SOURCE_NAME)
}

/// One line, without what only the compiler's author needs.
fn tidy(message: &str) -> String {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let message = rewritten(&message).unwrap_or(message);
    cut(&message)
}

/// Messages that mislead here, or that wrap our own.
fn rewritten(message: &str) -> Option<String> {
    if let Some(own) = message.strip_prefix("static assertion failed with ") {
        return Some(own.trim_matches('"').to_owned());
    }
    if let Some(own) = message.strip_prefix("static assertion failed: ") {
        return Some(own.to_owned());
    }
    if message.contains("without execution space annotations")
        || message.contains("explicitly marked as a __host__ function")
    {
        return Some(
            "this function would run on the host, where a kernel candidate has no code: mark it __device__".to_owned(),
        );
    }
    if message.contains("without memory space annotations") {
        let advice = "this variable would live on the host, where a kernel candidate has no code: mark it constexpr or __device__";
        return Some(advice.to_owned());
    }
    if message.contains("\"task_launch_") {
        return Some("each TASK_LAUNCH needs a line of its own".to_owned());
    }
    if message == "linkage specification is not allowed" {
        return Some("this must stand at file scope: is a closing brace missing before it?".to_owned());
    }
    let (_, header) = message.split_once("open source file ")?;
    Some(format!("there is no header {} for device code", header.replace(" (no directories in search list)", "")))
}

#[cfg(test)]
mod tests {
    use cuda_agent_sandbox::diagnostic::LONGEST;

    use super::*;

    fn lines(log: &str, source: &str) -> String {
        let show = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
        let text = diagnostics(log, source);
        text.iter().map(|d| format!("{}:{} {}\n", show(d.line), show(d.column), d.message)).collect()
    }

    #[test]
    fn errors_in_headers_are_reported_where_the_candidate_brings_them_in() {
        let log = "In file included from /usr/include/a.h:7,\n                 from candidate.cu:3:\n\
            /usr/include/b.h:9:2: error: #error no\n    9 | #error no\n      |  ^~~~~\n";
        assert_eq!(lines(log, ""), "3:- b.h(9): #error no\n");
        let log = "/cuda/x.h(44): error: no operator \"+\" matches these operands\n            operand types are: A + B\n    return a + b;\n             ^\n\
            \x20         detected during:\n            instantiation of \"T f(T)\" at line 12 of candidate.cu\n";
        assert_eq!(lines(log, ""), "-:- x.h(44): no operator \"+\" matches these operands operand types are: A + B\n");
    }

    #[test]
    fn what_ptxas_and_the_linker_say_is_kept() {
        let log = "ptxas /tmp/tmpxft_1.ptx, line 29; error   : Unknown modifier '.bar'\nptxas fatal   : Ptx assembly aborted due to errors\n";
        assert_eq!(lines(log, ""), "-:- ptxas: Unknown modifier '.bar'\n");
        let said = lines("ptxas fatal   : Unresolved extern function '_Z3foof'", "\nfloat foo(float);\n");
        assert_eq!(said, "2:- foo is declared and called, but nowhere defined\n");
        let log = "/usr/bin/ld: a.o: in function `launch':\na.cu:(.text+0x2): undefined reference to `foo'\ncollect2: error: ld returned 1 exit status\n";
        assert_eq!(lines(log, ""), "-:- undefined reference to `foo'\n");
    }

    #[test]
    fn a_log_without_errors_still_says_something() {
        assert_eq!(lines("", ""), "-:- the compiler refused the source without a message\n");
        assert_eq!(lines("\nKilled\n", ""), "-:- Killed\n");
    }

    #[test]
    fn many_errors_are_cut_and_repeated_ones_said_once() {
        let log: String = (0..50).map(|n| format!("candidate.cu({}): error: bad\n", n / 2 + 1)).collect();
        assert_eq!(diagnostics(&log, "").len(), MOST);
        assert_eq!(diagnostics(&log, "")[1].line, Some(2));
    }

    proptest::proptest! {
        #[test]
        fn any_text_gives_diagnostics(log in "(?s).{0,400}", source in "(?s).{0,60}") {
            assert_fits(&diagnostics(&log, &source));
        }

        #[test]
        fn anything_like_a_log_gives_diagnostics(parts in proptest::collection::vec(proptest::sample::select(PARTS.to_vec()), 0..40)) {
            assert_fits(&diagnostics(&parts.concat(), "int a;\nint é;\n"));
        }
    }

    const PARTS: [&str; 26] = [
        "candidate.cu",
        "(",
        ")",
        ": ",
        "error",
        "catastrophic ",
        "error: ",
        "fatal error: ",
        "4294967296",
        "2",
        ":",
        "\n",
        "  ",
        "^",
        "é",
        "\u{0}",
        "ptxas",
        "ptxas fatal   : ",
        " at line ",
        " of ",
        "detected during:",
        "In file included from ",
        "int a;",
        "\"",
        "#20-D",
        "nvcc",
    ];

    fn assert_fits(found: &[Diagnostic]) {
        assert!(!found.is_empty() && found.len() <= MOST);
        assert!(found.iter().all(|d| !d.message.contains('\n') && d.message.chars().count() <= LONGEST + 1));
    }
}
