//! From CUDA's own syntax to C++ that g++ reads, for the CPU device. Two things are no C++ and no macro can make them so:
//!
//! - shared memory: `extern __shared__ float s[];` becomes a pointer to the block's dynamic shared memory, and
//!   `__shared__ float s[32];` a variable that the runtime knows of, with red zones around it;
//! - launches: `kernel<<<grid, block>>>(x)` becomes a call with a lambda.
//!
//! What stands for them has names that begin with the one that the CPU device has in this source (`host.rs`).
//!
//! All else stays as it is, to the byte. Every token stays on its line, except a kernel's name whose `<<<…>>>` spans lines.
//! What cannot be read (a declaration inside a macro, say) is left to the header's definition of `__shared__`.

use std::ops::Range;

use cuda_agent_sandbox::tokens::{Dialect, Kind, Token, tokens};

/// The source with CUDA's syntax replaced; the CPU device's own names begin with `device`.
pub fn rewrite(source: &str, device: &str) -> String {
    let tokens = significant_tokens(source);
    let mut edits = Vec::new();
    let mut position = 0;
    while position < tokens.len() {
        position = edit_at(source, &tokens, position, device, &mut edits).unwrap_or(position + 1);
    }
    apply(source, edits)
}

/// Adds the edits for a construct whose mark is the token at `position`; gives the token after the construct.
fn edit_at(source: &str, tokens: &[Token], position: usize, device: &str, edits: &mut Vec<Edit>) -> Option<usize> {
    let text = &source[tokens[position].range.clone()];
    match text {
        "__shared__" => Declaration::around(source, tokens, position)?.edit(source, tokens, device, edits),
        "<" => Launch::around(source, tokens, position)?.edit(source, tokens, device, edits),
        _ => None,
    }
}

/// A piece of the source and what takes its place.
struct Edit {
    range: Range<usize>,
    text: String,
}

fn apply(source: &str, mut edits: Vec<Edit>) -> String {
    edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
    let mut result = String::with_capacity(source.len() + 64 * edits.len());
    let mut done = 0;
    for edit in edits {
        result.push_str(&source[done..edit.range.start]);
        result.push_str(&edit.text);
        done = edit.range.end;
    }
    result.push_str(&source[done..]);
    result
}

/// Tokens that are neither white space nor comments.
fn significant_tokens(source: &str) -> Vec<Token> {
    let mut all = tokens(source, Dialect::Gcc).all;
    all.retain(|token| !matches!(token.kind, Kind::Space | Kind::Comment));
    all
}

fn text<'a>(source: &'a str, token: &Token) -> &'a str {
    &source[token.range.clone()]
}

/// The token that closes what the one at `open` opens.
fn closing(source: &str, tokens: &[Token], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (position, token) in tokens.iter().enumerate().skip(open) {
        match text(source, token) {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.checked_sub(1)?,
            _ => continue,
        }
        if depth == 0 {
            return Some(position);
        }
    }
    None
}

/// The token that opens what the one at `close` closes; with `>`, a template's `<`.
fn opening(source: &str, tokens: &[Token], close: usize) -> Option<usize> {
    let (open_sign, close_sign) = match text(source, &tokens[close]) {
        ")" => ("(", ")"),
        ">" => ("<", ">"),
        _ => return None,
    };
    let mut depth = 0usize;
    let mut position = close;
    loop {
        let here = text(source, &tokens[position]);
        if here == close_sign {
            depth += 1;
        } else if here == open_sign {
            depth -= 1;
        } else if here == ")" {
            position = opening(source, tokens, position)?;
        } else if matches!(here, ";" | "{" | "}") {
            return None;
        }
        if depth == 0 {
            return Some(position);
        }
        position = position.checked_sub(1)?;
    }
}

/// A declaration of shared memory: `specifiers declarator, declarator;`.
struct Declaration {
    /// Its first token.
    start: usize,
    /// Its semicolon.
    end: usize,
}

/// One variable of a declaration.
struct Declarator {
    /// The token that is its name.
    name: usize,
    /// The token after its last.
    end: usize,
}

impl Declaration {
    /// The declaration that the `__shared__` at `mark` belongs to.
    fn around(source: &str, tokens: &[Token], mark: usize) -> Option<Self> {
        let mut start = mark;
        while let Some(before) = start.checked_sub(1) {
            start = match text(source, &tokens[before]) {
                ";" | "{" | "}" | ":" => break,
                ")" => opening(source, tokens, before)?,
                "#" | "(" | "," | "=" => return None,
                // `extern "C" __shared__ …` and the like are read as far as the literal.
                _ if tokens[before].kind == Kind::Literal => break,
                _ => before,
            };
        }
        let mut end = mark;
        while text(source, tokens.get(end)?) != ";" {
            end = match text(source, &tokens[end]) {
                "(" | "[" | "{" => closing(source, tokens, end)? + 1,
                ")" | "]" | "}" | "#" | "=" => return None,
                _ => end + 1,
            };
        }
        Some(Self { start, end })
    }

    fn edit(&self, source: &str, tokens: &[Token], device: &str, edits: &mut Vec<Edit>) -> Option<usize> {
        let declarators = self.declarators(source, tokens)?;
        if self.words(source, tokens).any(|word| word == "extern") {
            self.edit_dynamic(source, tokens, &declarators, device, edits)?;
        } else {
            self.edit_static(source, tokens, &declarators, device, edits);
        }
        Some(self.end + 1)
    }

    fn words<'a>(&self, source: &'a str, tokens: &'a [Token]) -> impl Iterator<Item = &'a str> {
        tokens[self.start..self.end].iter().map(|token| text(source, token))
    }

    /// The variables, split at commas outside of everything.
    fn declarators(&self, source: &str, tokens: &[Token]) -> Option<Vec<Declarator>> {
        let mut declarators = Vec::new();
        let (mut position, mut angles) = (self.start, 0i32);
        let mut name = None;
        let mut named = false;
        while position <= self.end {
            let token = &tokens[position];
            let mut next = position + 1;
            match text(source, token) {
                "__align__" | "alignas" | "__attribute__" => next = closing(source, tokens, position + 1)? + 1,
                "<" => angles += 1,
                ">" => angles -= 1,
                "," | ";" if angles == 0 => {
                    declarators.push(Declarator { name: name.take()?, end: position });
                    named = false;
                }
                "[" => {
                    named = true;
                    next = closing(source, tokens, position)? + 1;
                }
                "{" => next = closing(source, tokens, position)? + 1,
                "(" => return None,
                "__shared__" => {}
                _ if token.kind == Kind::Word && angles == 0 && !named => name = Some(position),
                _ => {}
            }
            position = next;
        }
        Some(declarators)
    }

    /// The declaration stays where it is, as the members of a struct that nothing is made of, and references follow it.
    fn edit_static(
        &self,
        source: &str,
        tokens: &[Token],
        declarators: &[Declarator],
        device: &str,
        edits: &mut Vec<Edit>,
    ) {
        let start = tokens[self.start].range.start;
        let structure = format!("{device}_shared_{start}");
        edits.push(Edit { range: start..start, text: format!("struct {structure} {{ ") });
        for token in &tokens[self.start..self.end] {
            if matches!(text(source, token), "__shared__" | "static" | "__device__") {
                edits.push(Edit { range: token.range.clone(), text: String::new() });
            }
        }
        let mut after = " };".to_owned();
        for (number, declarator) in declarators.iter().enumerate() {
            let name = text(source, &tokens[declarator.name]);
            let variable = format!("{device}::Shared<{structure}, decltype({structure}::{name}), {number}>");
            after += &format!(" static auto& {name} = {variable}::memory.value;");
        }
        let end = tokens[self.end].range.end;
        edits.push(Edit { range: end..end, text: after });
    }

    /// Each `T name[]` becomes a pointer to the beginning of the block's dynamic shared memory.
    fn edit_dynamic(
        &self,
        source: &str,
        tokens: &[Token],
        declarators: &[Declarator],
        device: &str,
        edits: &mut Vec<Edit>,
    ) -> Option<()> {
        let element = element_type(source, &tokens[self.start..declarators.first()?.name]);
        let mut replacement = String::new();
        for declarator in declarators {
            let bounds = &tokens[declarator.name + 1..declarator.end];
            let [open, close, inner @ ..] = bounds else { return None };
            if text(source, open) != "[" || text(source, close) != "]" {
                return None;
            }
            let name = text(source, &tokens[declarator.name]);
            let inner = joined(source, inner);
            replacement += &format!("auto* const {name} = {device}::dynamic<{element}{inner}>(); ");
        }
        let range = tokens[self.start].range.start..tokens[self.end].range.end;
        let lines = source[range.clone()].matches('\n').count();
        let replacement = format!("{}{}", replacement.trim_end(), "\n".repeat(lines));
        edits.push(Edit { range, text: replacement });
        Some(())
    }
}

/// What is left of specifiers without storage and alignment: the element's type.
fn element_type(source: &str, tokens: &[Token]) -> String {
    let mut kept = Vec::new();
    let mut position = 0;
    while position < tokens.len() {
        match text(source, &tokens[position]) {
            "extern" | "static" | "__shared__" | "__device__" => {}
            "__align__" | "alignas" | "__attribute__" => {
                position = closing(source, tokens, position + 1).unwrap_or(position);
            }
            _ => kept.push(tokens[position].clone()),
        }
        position += 1;
    }
    joined(source, &kept)
}

fn joined(source: &str, tokens: &[Token]) -> String {
    tokens.iter().map(|token| text(source, token)).collect::<Vec<_>>().join(" ")
}

/// `kernel<<<configuration>>>(arguments)`.
struct Launch {
    /// The first token of the kernel's name.
    kernel: usize,
    /// The first `<`.
    open: usize,
    /// The last `>`.
    close: usize,
    /// The arguments' parentheses.
    arguments: Range<usize>,
}

impl Launch {
    fn around(source: &str, tokens: &[Token], open: usize) -> Option<Self> {
        if !is_triple(source, tokens, open, "<") {
            return None;
        }
        let mut close = open + 3;
        while !is_triple(source, tokens, close, ">") || is_triple(source, tokens, close + 1, ">") {
            close = match text(source, tokens.get(close)?) {
                "(" | "[" | "{" => closing(source, tokens, close)? + 1,
                ")" | "]" | "}" | ";" => return None,
                _ => close + 1,
            };
        }
        let close = close + 2;
        if text(source, tokens.get(close + 1)?) != "(" {
            return None;
        }
        let arguments = close + 1..closing(source, tokens, close + 1)?;
        Some(Self { kernel: kernel_start(source, tokens, open)?, open, close, arguments })
    }

    fn edit(&self, source: &str, tokens: &[Token], device: &str, edits: &mut Vec<Edit>) -> Option<usize> {
        let start = tokens[self.kernel].range.start;
        let kernel_end = tokens[self.open - 1].range.end;
        let configuration = &source[tokens[self.open + 2].range.end..tokens[self.close - 2].range.start];
        let arguments = &tokens[self.arguments.start + 1..self.arguments.end];
        let opened = tokens[self.arguments.start].range.clone();
        let end = tokens[self.arguments.end].range.end;
        let before = tokens[self.open].range.start..opened.start;
        if evaluate_once(source, arguments) {
            let before_kernel =
                format!("{device}::configure({configuration}) << {device}::bind([=](auto... values) {{ ");
            edits.push(Edit { range: start..start, text: before_kernel });
            edits.push(Edit { range: kernel_end..before.start, text: String::new() });
            edits.push(Edit { range: before.start..opened.end, text: "(values...); }, ".to_owned() });
            // A pointer only where it is written; as a value it is a number.
            let nulls = arguments.iter().filter(|token| text(source, token) == "NULL");
            edits.extend(nulls.map(|token| Edit { range: token.range.clone(), text: "nullptr".to_owned() }));
        } else {
            let text = format!("{device}::configure({configuration}) << [=]() {{ ");
            edits.push(Edit { range: start..start, text });
            edits.push(Edit { range: before, text: String::new() });
            edits.push(Edit { range: end..end, text: "; }".to_owned() });
        }
        Some(self.arguments.start + 1)
    }
}

/// Three equal signs next to each other.
fn is_triple(source: &str, tokens: &[Token], first: usize, sign: &str) -> bool {
    tokens.get(first..first + 3).is_some_and(|three| {
        three.iter().all(|token| text(source, token) == sign) && three[2].range.end - three[0].range.start == 3
    })
}

/// The first token of `space::kernel<T, 4>` or `(*kernel)`, which ends before `open`.
fn kernel_start(source: &str, tokens: &[Token], open: usize) -> Option<usize> {
    let mut start = open.checked_sub(1)?;
    if matches!(text(source, &tokens[start]), ">" | ")") {
        let parenthesis = text(source, &tokens[start]) == ")";
        start = opening(source, tokens, start)?;
        if parenthesis {
            return Some(start);
        }
        start = start.checked_sub(1)?;
    }
    loop {
        if tokens[start].kind != Kind::Word {
            return None;
        }
        let Some(name) = before_colons(source, tokens, start) else { return Some(start) };
        match text(source, &tokens[name]) {
            ">" => start = opening(source, tokens, name)?.checked_sub(1)?,
            "template" => start = name,
            _ if tokens[name].kind == Kind::Word => start = name,
            _ => return Some(start - 2),
        }
    }
}

/// The token before the `::` that stands before `position`.
fn before_colons(source: &str, tokens: &[Token], position: usize) -> Option<usize> {
    let first = position.checked_sub(2)?;
    let colons = tokens[first..position].iter().all(|token| text(source, token) == ":");
    if colons { first.checked_sub(1) } else { None }
}

/// Whether arguments may do something, so that they must not be evaluated by each thread: they count, assign or call, or
/// follow a pointer, which the host must be able to.
fn evaluate_once(source: &str, arguments: &[Token]) -> bool {
    arguments.windows(2).any(|pair| {
        let (first, second) = (text(source, &pair[0]), text(source, &pair[1]));
        let adjacent = pair[0].range.end == pair[1].range.start;
        let counts = adjacent && first == second && matches!(first, "+" | "-");
        let calls = matches!(second, "(" | "{") && pair[0].kind == Kind::Word && first != "sizeof";
        let follows = second == "[" || (adjacent && first == "-" && second == ">");
        let assigns = second == "=" && !(adjacent && matches!(first, "=" | "<" | ">" | "!"));
        counts || calls || assigns || follows
    }) || has_dereference(source, arguments)
}

/// Whether a `*` stands where no product can.
fn has_dereference(source: &str, arguments: &[Token]) -> bool {
    let mut before = "(";
    arguments.iter().any(|token| {
        let found = text(source, token) == "*" && matches!(before, "(" | ")" | "," | "+" | "-" | "*" | "/" | "?" | ":");
        before = text(source, token);
        found
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::rewrite;

    fn rewritten(source: &str, expected: &str) {
        assert_eq!(rewrite(source, "cuda_cpu"), expected);
    }

    #[test]
    fn dynamic_shared_memory_becomes_a_pointer() {
        rewritten("{ extern __shared__ float s[]; }", "{ auto* const s = cuda_cpu::dynamic<float>(); }");
        rewritten(
            "extern __shared__ __align__(sizeof(T)) unsigned char raw[];",
            "auto* const raw = cuda_cpu::dynamic<unsigned char>();",
        );
        rewritten(
            "{ extern __shared__ alignas(16) volatile float s[]; }",
            "{ auto* const s = cuda_cpu::dynamic<volatile float>(); }",
        );
        rewritten("{ __shared__ extern float4 s[]; }", "{ auto* const s = cuda_cpu::dynamic<float4>(); }");
        rewritten("{ extern __shared__ float s[][32]; }", "{ auto* const s = cuda_cpu::dynamic<float[ 32 ]>(); }");
        rewritten(
            "{ extern __shared__\n  Pair<int, 4> s[]; }",
            "{ auto* const s = cuda_cpu::dynamic<Pair < int , 4 >>();\n }",
        );
    }

    #[test]
    fn static_shared_memory_has_a_place_for_each_variable() {
        rewritten(
            "{ __shared__ float a[32][33], b; }",
            "{ struct cuda_cpu_shared_2 {  float a[32][33], b; }; \
             static auto& a = cuda_cpu::Shared<cuda_cpu_shared_2, decltype(cuda_cpu_shared_2::a), 0>::memory.value; \
             static auto& b = cuda_cpu::Shared<cuda_cpu_shared_2, decltype(cuda_cpu_shared_2::b), 1>::memory.value; }",
        );
        rewritten(
            "{ __align__(16) __shared__ Pair<T, 2>* p; }",
            "{ struct cuda_cpu_shared_2 { __align__(16)  Pair<T, 2>* p; }; \
             static auto& p = cuda_cpu::Shared<cuda_cpu_shared_2, decltype(cuda_cpu_shared_2::p), 0>::memory.value; }",
        );
    }

    #[test]
    fn what_cannot_be_read_stays() {
        for source in [
            "#define SHARED __shared__ float",
            "__shared__ float f(int);",
            "__shared__ float x = 3;",
            "a << b; c >> d; e <<= 2;",
            "f(__shared__ int x)",
        ] {
            rewritten(source, source);
        }
    }

    #[test]
    fn launches_become_calls() {
        rewritten("k<<<g, b>>>(x, 3);", "cuda_cpu::configure(g, b) << [=]() { k(x, 3); };");
        rewritten(
            "a::k<float, (4 > 2)><<<dim3(1, 2), b, n * sizeof(float), s>>>(x);",
            "cuda_cpu::configure(dim3(1, 2), b, n * sizeof(float), s) << [=]() { a::k<float, (4 > 2)>(x); };",
        );
        rewritten("(*k)<<<1, 2>>>();", "cuda_cpu::configure(1, 2) << [=]() { (*k)(); };");
        rewritten("if (n) ::k<<<1, 2>>>(x);", "if (n) cuda_cpu::configure(1, 2) << [=]() { ::k(x); };");
    }

    #[test]
    fn arguments_that_do_something_are_evaluated_once() {
        rewritten(
            "k<<<1, 2>>>(p++, next());",
            "cuda_cpu::configure(1, 2) << cuda_cpu::bind([=](auto... values) { k(values...); }, p++, next());",
        );
        rewritten(
            "k<<<1, 2>>>(x[0], NULL);",
            "cuda_cpu::configure(1, 2) << cuda_cpu::bind([=](auto... values) { k(values...); }, x[0], nullptr);",
        );
        for followed in ["x[0]", "3, *p", "(float)*p", "state->n", "Pair{p}"] {
            rewritten(
                &format!("k<<<1, 2>>>({followed});"),
                &format!(
                    "cuda_cpu::configure(1, 2) << cuda_cpu::bind([=](auto... values) {{ k(values...); }}, {followed});"
                ),
            );
        }
        for plain in ["n * 4", "(float*)x", "x, {1, 2}"] {
            rewritten(
                &format!("k<<<1, 2>>>({plain});"),
                &format!("cuda_cpu::configure(1, 2) << [=]() {{ k({plain}); }};"),
            );
        }
    }

    #[test]
    fn comments_and_literals_stay() {
        for source in [
            "// k<<<1, 2>>>(x);",
            "/* asm( */",
            "\"asm(\"",
            "R\"a(k<<<1,1>>>())a\"",
            "// a \\\n asm(\n",
            "'\\''; \"<<<\"",
        ] {
            rewritten(source, source);
        }
    }

    #[test]
    fn lines_of_a_launch_stay() {
        let source = "k<float><<<grid,\n block>>>(\n x,\n y);\nz";
        let result = rewrite(source, "cuda_cpu");
        assert_eq!(result.lines().count(), source.lines().count());
        assert_eq!(result.lines().last(), Some("z"));
    }

    fn pieces() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "__shared__",
            "extern",
            "float",
            "x",
            "k",
            "[",
            "]",
            "[]",
            "<<<",
            ">>>",
            "(",
            ")",
            "{",
            "}",
            ";",
            ",",
            "<",
            ">",
            "::",
            "asm",
            "volatile",
            "\"",
            "'",
            "\n",
            "//",
            "/*",
            "*/",
            "\\\n",
            "R\"(",
            ")\"",
            "1'000",
            "0x1p-3",
            "=",
            "#",
            " ",
            "é",
            "++",
        ]);
        prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.join(" "))
    }

    proptest! {
        #[test]
        fn the_number_of_lines_never_changes(source in pieces()) {
            prop_assert_eq!(rewrite(&source, "cuda_cpu").matches('\n').count(), source.matches('\n').count());
        }

        #[test]
        fn other_sources_stay(source in pieces()) {
            let source = source.replace("__shared__", "static").replace("<<<", "<<").replace("asm", "x");
            prop_assert_eq!(rewrite(&source, "cuda_cpu"), source);
        }
    }
}
