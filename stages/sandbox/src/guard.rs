//! What a preprocessed candidate for the CPU device may hold, so that it can neither switch off nor reach what watches it.
//!
//! The CPU device's checks are instructions that g++ adds, and functions that these call. Attributes, pragmas, assembly
//! and the functions' own names could take that away. Macros, joined lines and pasted names can spell any of these in
//! many ways, so they are looked for after the preprocessor, in the very text that is then compiled. Headers of the system
//! are judged like the candidate: its macros can write into them. Not covered: what a program does with addresses that it
//! works out itself.

use crate::diagnostic::{CompileFailure, Diagnostic};
use crate::tokens::{Dialect, Kind, tokens};

/// Parts of the names of what the checks call.
const WATCHERS: [&str; 9] = [
    "__asan_",
    "__tsan_",
    "__ubsan_",
    "__sanitizer_",
    "__lsan_",
    "__hwasan_",
    "__msan_",
    "__interceptor_",
    "__builtin_ia32_",
];

/// Attributes, without underscores around them.
const ATTRIBUTES: [&str; 12] = [
    "alias",
    "copy",
    "ifunc",
    "interrupt",
    "naked",
    "no_address_safety_analysis",
    "optimize",
    "patchable_function_entry",
    "section",
    "symver",
    "target",
    "target_clones",
];

/// Of `#pragma GCC`, and of `#pragma` itself.
const GCC_PRAGMAS: [&str; 9] =
    ["diagnostic", "error", "ivdep", "novector", "poison", "system_header", "unroll", "visibility", "warning"];
const PRAGMAS: [&str; 4] = ["clang", "redefine_extname", "scalar_storage_order", "weak"];

/// What the rest of a preprocessed source is refused for. `name` is what the CPU device calls its own in this source, which
/// only its own macros know.
pub fn check(preprocessed: &str, file: &str, name: &str) -> Result<(), CompileFailure> {
    let cut = tokens(preprocessed, Dialect::Gcc);
    let significant = cut.all.into_iter().filter(|token| !matches!(token.kind, Kind::Comment));
    let mut reader = Reader { text: preprocessed, file, name, line: 1, in_candidate: true, pieces: Vec::new() };
    let mut skip_until = 0;
    let mut begins_line = true;
    for token in significant {
        let text = &preprocessed[token.range.clone()];
        let in_skipped = token.range.start < skip_until;
        if !in_skipped && begins_line && text == "#" {
            skip_until =
                preprocessed[token.range.end..].find('\n').map_or(preprocessed.len(), |at| token.range.end + at);
            reader.directive(&preprocessed[token.range.end..skip_until])?;
        } else if !in_skipped && token.kind != Kind::Space {
            reader.pieces.push(Piece { kind: token.kind, text, line: reader.line });
        }
        if reader.in_candidate {
            reader.line += u32::try_from(text.matches('\n').count()).unwrap_or(0);
        }
        begins_line = text.ends_with('\n') || (begins_line && token.kind == Kind::Space);
    }
    if let Some(at) = cut.doubtful {
        let line =
            reader.pieces.iter().find(|piece| reader.offset(piece) >= at).map_or(reader.line, |piece| piece.line);
        return Err(refused(line, "this raw string", "compilers read it differently"));
    }
    reader.judge()
}

#[derive(Clone, Copy)]
struct Piece<'a> {
    kind: Kind,
    text: &'a str,
    line: u32,
}

struct Reader<'a> {
    text: &'a str,
    file: &'a str,
    name: &'a str,
    /// Of the candidate; inside a header, that of its `#include`.
    line: u32,
    in_candidate: bool,
    pieces: Vec<Piece<'a>>,
}

fn refused(line: u32, what: &str, why: &str) -> CompileFailure {
    let message = format!("{what} is refused: {why}");
    CompileFailure::Source(vec![Diagnostic { line: Some(line), column: None, message }])
}

const CHECKS: &str = "a candidate can't change how it is checked";

impl<'a> Reader<'a> {
    fn offset(&self, piece: &Piece) -> usize {
        piece.text.as_ptr() as usize - self.text.as_ptr() as usize
    }

    /// A line marker (`# 12 "file" 2`) or a pragma; the preprocessor leaves no others.
    fn directive(&mut self, rest: &str) -> Result<(), CompileFailure> {
        let mut words = rest.split_whitespace();
        match words.next() {
            Some("pragma") => self.pragma(words),
            Some(number) => {
                let named = rest.split('"').nth(1).is_some_and(|file| file == self.file);
                if named && let Ok(number) = number.parse::<u32>() {
                    // The line that follows has this number.
                    self.line = number.saturating_sub(1);
                }
                self.in_candidate = named;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn pragma<'w>(&self, mut words: impl Iterator<Item = &'w str>) -> Result<(), CompileFailure> {
        let first = words.next().unwrap_or_default();
        let second = words.next().unwrap_or_default();
        let second = second.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let of_gcc = first == "GCC" && !GCC_PRAGMAS.contains(&second);
        if of_gcc || PRAGMAS.contains(&first) {
            let what = if of_gcc { format!("#pragma GCC {second}") } else { format!("#pragma {first}") };
            return Err(refused(self.line, &what, CHECKS));
        }
        Ok(())
    }

    fn judge(&self) -> Result<(), CompileFailure> {
        for (at, piece) in self.pieces.iter().enumerate() {
            if piece.kind != Kind::Word {
                if self.opens_attribute(at) {
                    self.attribute(at, 0)?;
                }
                continue;
            }
            match piece.text {
                "asm" | "__asm" | "__asm__" if !self.is_label(at) => {
                    let message = "the CPU device does not support inline PTX".to_owned();
                    return Err(CompileFailure::Unsupported(Diagnostic {
                        line: Some(piece.line),
                        column: None,
                        message,
                    }));
                }
                "__attribute__" | "__attribute" => self.attribute(at + 1, 2)?,
                word if is_watcher(word) => {
                    return Err(refused(piece.line, word, "it belongs to what checks the candidate"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn sign(&self, at: usize) -> &'a str {
        self.pieces.get(at).map_or("", |piece| piece.text)
    }

    /// `[[`, in any spelling.
    fn opens_attribute(&self, at: usize) -> bool {
        let opens = |at: usize| match (self.sign(at), self.sign(at + 1)) {
            ("[", _) => Some(1),
            ("<", ":") => Some(2),
            _ => None,
        };
        opens(at).is_some_and(|length| opens(at + length).is_some())
    }

    /// The attributes in the brackets that open at `from`; their names stand inside of so many parentheses.
    fn attribute(&self, from: usize, parentheses: usize) -> Result<(), CompileFailure> {
        let (mut depth, mut parenthesis, mut is_open) = (0_usize, 0_usize, false);
        let mut strings = String::new();
        for (at, piece) in self.pieces.iter().enumerate().skip(from) {
            match piece.text {
                "(" => (depth, parenthesis) = (depth + 1, parenthesis + 1),
                ")" => (depth, parenthesis) = (depth.saturating_sub(1), parenthesis.saturating_sub(1)),
                "[" | "{" => depth += 1,
                "]" | "}" => depth = depth.saturating_sub(1),
                ":" if self.sign(at - 1) == "<" => depth += 1,
                ">" if self.sign(at - 1) == ":" && self.sign(at - 2) != ":" => depth = depth.saturating_sub(1),
                word if piece.kind == Kind::Word => {
                    let plain = word.trim_matches('_');
                    let anywhere = ["sanitize", "instrument"].iter().any(|part| word.contains(part));
                    let is_ours = plain == "section" && self.sign(at + 2).contains(self.name);
                    if anywhere || (parenthesis == parentheses && ATTRIBUTES.contains(&plain) && !is_ours) {
                        return Err(refused(piece.line, &format!("the attribute {word}"), CHECKS));
                    }
                }
                literal if piece.kind == Kind::Literal => {
                    strings += literal.trim_matches('"');
                    if is_watcher(&strings) || literal.contains('\\') {
                        return Err(refused(piece.line, literal, "it belongs to what checks the candidate"));
                    }
                }
                _ => {}
            }
            if piece.kind != Kind::Literal {
                strings.clear();
            }
            is_open |= depth > 0;
            // A digraph has two signs.
            if depth == 0 && (is_open || at > from) {
                break;
            }
        }
        Ok(())
    }

    /// Another name for a function, as the C library's headers have it: `) __asm__ ("" "__isoc99_scanf")`. No instruction
    /// has an underscore, and none is called like one of [`LABELS`].
    fn is_label(&self, at: usize) -> bool {
        let inside = self.pieces.iter().skip(at + 2).take_while(|piece| piece.kind == Kind::Literal);
        let literals: Vec<&str> = inside.map(|piece| piece.text).collect();
        let quoted =
            literals.iter().all(|literal| literal.len() > 1 && literal.starts_with('"') && literal.ends_with('"'));
        let name: String = literals.iter().map(|literal| literal.trim_matches('"')).collect();
        at > 0
            && self.sign(at - 1) == ")"
            && self.sign(at + 1) == "("
            && self.sign(at + 2 + literals.len()) == ")"
            && quoted
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
            && (name.contains('_') || LABELS.contains(&name.as_str()))
            && !is_watcher(&name)
    }
}

/// Functions that the C library's headers declare a second time for C++.
const LABELS: [&str; 21] = [
    "basename",
    "btowc",
    "index",
    "memchr",
    "memrchr",
    "rawmemchr",
    "rindex",
    "strcasestr",
    "strchr",
    "strchrnul",
    "strpbrk",
    "strrchr",
    "strstr",
    "wcschr",
    "wcschrnul",
    "wcspbrk",
    "wcsrchr",
    "wcsstr",
    "wcswcs",
    "wctob",
    "wmemchr",
];

fn is_watcher(name: &str) -> bool {
    name != "__builtin_ia32_pause" && WATCHERS.iter().any(|part| name.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Option<String> {
        match check(text, "c.cu", "cuda_cpu_x0") {
            Ok(()) => None,
            Err(CompileFailure::Source(found)) => {
                Some(format!("{} {}", found[0].line.unwrap_or_default(), found[0].message))
            }
            Err(CompileFailure::Unsupported(found)) => {
                Some(format!("{} {}", found.line.unwrap_or_default(), found.message))
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_switches_checks_off_is_refused() {
        let all = [
            "__attribute__((no_sanitize(\"address\"))) void f();",
            "\n__attribute__ ((noinline, __no_sanitize_thread__)) void f();",
            "[[gnu::no_sanitize(\"thread\")]] void f();",
            "[[using gnu: noinline, no_sanitize_address]] void f();",
            "<:<: gnu::no_sanitize_thread :>:> void f();",
            "__attribute__((disable_sanitizer_instrumentation)) void f();",
            "__attribute__((weakref(\"__ts\" \"an_acquire\"))) static void f();",
            "__attribute__((weakref(\"\\x5f_tsan_acquire\"))) static void f();",
            "__attribute__((section(\"cuda_agent_launches\"))) int f;",
            "__attribute__((__optimize__(\"O3\"))) void f();",
            "#pragma GCC optimize(\"O3\")",
            "#pragma GCC push_options",
            "#pragma redefine_extname f __tsan_acquire",
            "extern \"C\" void __asan_unpoison_memory_region(void*, long);",
            "void f() { __builtin___tsan_func_exit(); }",
            "void f() asm(\"__tsan_acquire\");",
            "void f() __asm__ (\"\" \"__tsan_acquire\");",
            "void f() { if (1) asm (\"\" \"syscall\"); }",
            "void f() { if (1) asm (\"\" \"rdtsc\"); asm(\"wcschr\"); }",
            "void f() { __asm volatile(\"x;\" ::: \"memory\"); }",
            "é\u{301}R\"(\"; asm(\"x\"); // )\"",
        ];
        let told: Vec<String> =
            all.iter().map(|text| said(text).unwrap_or_else(|| format!("ACCEPTED {text}"))).collect();
        insta::assert_snapshot!(told.join("\n"));
    }

    #[test]
    fn lines_are_the_candidates() {
        let text = "\n# 7 \"c.cu\"\nint a;\n# 1 \"/usr/include/x.h\" 1 3 4\n\n\n# 9 \"c.cu\" 2\n\nasm(\"x\");\n";
        assert_eq!(said(text).unwrap(), "10 the CPU device does not support inline PTX");
        let inside = "\n# 7 \"c.cu\"\nint a;\n# 1 \"x.h\" 1\n\n\nasm(\"x\");\n";
        assert_eq!(said(inside).unwrap(), "8 the CPU device does not support inline PTX");
    }

    #[test]
    fn honest_names_pass() {
        for text in [
            "int asm_like, section, copy, target, no_sanitize, optimize; a[section[copy]];",
            "const char* s = \"asm(no_sanitize) __tsan_read4\"; const char* r = R\"(__attribute__((naked)))\";",
            "__attribute__((aligned(section), noinline, always_inline, visibility(\"protected\"))) void f();",
            "__attribute__((section(\"cuda_cpu_x0_launches\"), used)) int f;",
            "[[nodiscard]] [[maybe_unused]] int f(); auto g = a[0][1]; std::vector<::x> v;",
            "#pragma unroll 4\n#pragma GCC diagnostic push\n#pragma GCC unroll 8\n#pragma nv_diag_suppress 20",
            "extern int sscanf (const char *s, ...) __asm__ (\"\" \"__isoc99_sscanf\") ;",
            "extern wchar_t *wcschr (wchar_t *s, wchar_t c) noexcept (true) __asm (\"wcschr\") __attribute__ ((__pure__));",
            "extern int f () __asm__ (\"\" \"pthread_mutex_consistent\") __attribute__ ((__nothrow__));",
        ] {
            assert_eq!(said(text), None, "{text}");
        }
    }
}
