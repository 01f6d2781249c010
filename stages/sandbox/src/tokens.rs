//! C++ source cut into tokens, as the compilers cut it: raw strings, joined lines, digit separators, header names.
//!
//! Compilers disagree on two points, so there are two dialects. For a third kind of text it depends on macros, or on
//! lines that are skipped, what is a comment and what is not: [`Tokens::doubtful`] says where the first such text is.
//! Trigraphs are no part of C++17 and are not replaced.

use std::ops::Range;

/// Whose rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// NVRTC's: a backslash joins lines only as the last character of one; a lone carriage return ends none.
    Edg,
    /// The one of g++, also in nvcc: blanks may follow such a backslash, and a lone carriage return ends a line.
    Gcc,
}

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name or a keyword.
    Word,
    /// A number, a string or a character, with its prefix.
    Literal,
    /// One character.
    Sign,
    /// A comment; one that ends with its line without that end.
    Comment,
    /// One character of white space, or a joint of two lines.
    Space,
}

/// A piece of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What it is.
    pub kind: Kind,
    /// Where, in bytes. A token that goes on in the next line includes the joint.
    pub range: Range<usize>,
}

/// A whole source, without gaps.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// In order.
    pub all: Vec<Token>,
    /// The offset from which on the tokens may be others to the compiler.
    pub doubtful: Option<usize>,
}

/// Cuts a source.
pub fn tokens(source: &str, dialect: Dialect) -> Tokens {
    let mut lexer = Lexer {
        source,
        dialect,
        at: 0,
        doubtful: None,
        line: Line::Begins,
        directive: None,
        conditions: 0,
        before: None,
    };
    let mut all = Vec::new();
    while lexer.at < source.len() {
        let start = lexer.at;
        let kind = lexer.next();
        all.push(Token { kind, range: start..lexer.at });
    }
    Tokens { all, doubtful: lexer.doubtful }
}

/// Whether a character can be part of a name.
pub fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_' || character == '$'
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    /// Nothing but white space and comments so far.
    Begins,
    Directive,
    Text,
}

struct Lexer<'a> {
    source: &'a str,
    dialect: Dialect,
    at: usize,
    doubtful: Option<usize>,
    line: Line,
    /// The directive's name, once it was read.
    directive: Option<String>,
    /// How many `#if` are open.
    conditions: u32,
    /// The character before.
    before: Option<char>,
}

const RAW_PREFIXES: [&str; 5] = ["R", "u8R", "uR", "UR", "LR"];
const PREFIXES: [&str; 4] = ["u8", "u", "U", "L"];

impl Lexer<'_> {
    fn next(&mut self) -> Kind {
        if let Some(length) = self.joint(self.at) {
            self.at += length;
            return Kind::Space;
        }
        let Some((first, end)) = self.character(self.at) else { return Kind::Space };
        let kind = match first {
            _ if self.ends_line(self.at) => {
                (self.line, self.directive) = (Line::Begins, None);
                self.skip(end, Kind::Space)
            }
            _ if first.is_whitespace() => self.skip(end, Kind::Space),
            '/' if self.follows(self.at, "//") => self.skip(self.end_of_line(self.at), Kind::Comment),
            '/' if self.follows(self.at, "/*") => self.skip(self.end_of_comment(end), Kind::Comment),
            _ => {
                let opens = self.line == Line::Begins && (first == '#' || self.follows(self.at, "%:"));
                let kind = self.significant(first, end);
                self.line = match self.line {
                    Line::Begins if opens => Line::Directive,
                    Line::Begins => Line::Text,
                    line => line,
                };
                kind
            }
        };
        self.before = self.source[..self.at].chars().next_back();
        kind
    }

    fn significant(&mut self, first: char, end: usize) -> Kind {
        match first {
            '"' | '\'' => self.skip(self.end_of_quoted(self.at), Kind::Literal),
            _ if first.is_ascii_digit() => self.skip(self.end_of_number(self.at), Kind::Literal),
            _ if is_word(first) => self.word(),
            '<' if self.line == Line::Directive => {
                if self.may_be_header_name(end) {
                    self.doubt();
                }
                self.skip(end, Kind::Sign)
            }
            _ => self.skip(end, Kind::Sign),
        }
    }

    fn word(&mut self) -> Kind {
        let start = self.at;
        let (word, end) = self.word_at(start);
        let next = self.character(end).map(|(next, _)| next);
        if next == Some('"') && RAW_PREFIXES.contains(&word.as_str()) {
            // Compilers differ in which characters outside of ASCII belong to a name.
            if self.before.is_some_and(|before| !before.is_ascii()) {
                self.doubt();
            }
            return self.raw_string(end);
        }
        if matches!(next, Some('"' | '\'')) && PREFIXES.contains(&word.as_str()) {
            return self.skip(self.end_of_quoted(end), Kind::Literal);
        }
        if word.chars().any(|letter| letter == '$' || !letter.is_ascii()) && next == Some('"') {
            self.doubt();
        }
        if self.line == Line::Directive && self.directive.is_none() {
            match word.as_str() {
                "if" | "ifdef" | "ifndef" => self.conditions += 1,
                "endif" => self.conditions = self.conditions.saturating_sub(1),
                _ => {}
            }
            self.directive = Some(word);
        }
        self.skip(end, Kind::Word)
    }

    /// From its quote on. Between the parentheses nothing is joined.
    fn raw_string(&mut self, quote: usize) -> Kind {
        let start = self.at;
        let from = self.character(quote).map_or(quote, |(_, end)| end);
        let rest = &self.source[from..];
        let Some(open) = rest.find('(').filter(|open| is_delimiter(&rest[..*open])) else {
            self.doubt();
            return self.skip(from, Kind::Literal);
        };
        let closing = format!("){}\"", &rest[..open]);
        let end = rest[open..].find(&closing).map_or(self.source.len(), |at| from + open + at + closing.len());
        // In lines that are skipped, and in directives, compilers may end it with its line.
        let spans_lines = self.source[start..end].contains(['\n', '\r']);
        if spans_lines && (self.line == Line::Directive || self.conditions > 0) {
            self.doubt();
        }
        self.skip(end, Kind::Literal)
    }

    fn doubt(&mut self) {
        self.doubtful.get_or_insert(self.at);
    }

    fn skip(&mut self, end: usize, kind: Kind) -> Kind {
        self.at = end;
        kind
    }

    /// The length of a joint of two lines, or of several in a row.
    fn joint(&self, at: usize) -> Option<usize> {
        let mut length = 0;
        while let Some(more) = self.one_joint(at + length) {
            length += more;
        }
        (length > 0).then_some(length)
    }

    fn one_joint(&self, at: usize) -> Option<usize> {
        let after = self.source[at..].strip_prefix('\\')?;
        let blanks = match self.dialect {
            Dialect::Edg => 0,
            Dialect::Gcc => after.bytes().take_while(|byte| matches!(byte, b' ' | b'\t' | 0x0b | 0x0c)).count(),
        };
        let end = &after[blanks..];
        let length = match end.as_bytes() {
            [b'\r', b'\n', ..] => 2,
            [b'\n', ..] => 1,
            [b'\r', ..] if self.dialect == Dialect::Gcc => 1,
            _ => return None,
        };
        Some(1 + blanks + length)
    }

    /// The character at `at` or after the joint there, and where it ends.
    fn character(&self, at: usize) -> Option<(char, usize)> {
        let at = at + self.joint(at).unwrap_or(0);
        let character = self.source[at..].chars().next()?;
        Some((character, at + character.len_utf8()))
    }

    fn follows(&self, mut at: usize, text: &str) -> bool {
        text.chars().all(|expected| match self.character(at) {
            Some((found, end)) => {
                at = end;
                found == expected
            }
            None => false,
        })
    }

    fn ends_line(&self, at: usize) -> bool {
        match self.source.as_bytes().get(at) {
            Some(b'\n') => true,
            Some(b'\r') => self.dialect == Dialect::Gcc,
            _ => false,
        }
    }

    /// The end of the line that goes on over joints, before its last character.
    fn end_of_line(&self, mut at: usize) -> usize {
        while at < self.source.len() {
            at += self.joint(at).unwrap_or(0);
            if at >= self.source.len() || self.ends_line(at) {
                return at;
            }
            at = self.character(at).map_or(self.source.len(), |(_, end)| end);
        }
        at
    }

    /// `from` is after the slash.
    fn end_of_comment(&self, from: usize) -> usize {
        let mut at = self.character(from).map_or(from, |(_, end)| end);
        while let Some((found, end)) = self.character(at) {
            if found == '*' && self.follows(at, "*/") {
                return self.character(end).map_or(end, |(_, end)| end);
            }
            at = end;
        }
        self.source.len()
    }

    /// A quote that is not closed ends with its line: an apostrophe in `#error` text is no character.
    fn end_of_quoted(&self, at: usize) -> usize {
        let Some((quote, mut at)) = self.character(at) else { return self.source.len() };
        let mut escaped = false;
        loop {
            at += self.joint(at).unwrap_or(0);
            let Some((found, end)) = self.character(at) else { return self.source.len() };
            match found {
                _ if self.ends_line(at) => return at,
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                _ if found == quote => return end,
                _ => {}
            }
            at = end;
        }
    }

    fn end_of_number(&self, at: usize) -> usize {
        let Some((mut before, mut at)) = self.character(at) else { return self.source.len() };
        while let Some((found, end)) = self.character(at) {
            let sign_of_exponent = matches!(found, '+' | '-') && matches!(before, 'e' | 'E' | 'p' | 'P');
            let separates = || self.character(end).is_some_and(|(next, _)| next.is_ascii_alphanumeric() || next == '_');
            if !(is_word(found) || found == '.' || sign_of_exponent || (found == '\'' && separates())) {
                break;
            }
            (before, at) = (found, end);
        }
        at
    }

    fn word_at(&self, mut at: usize) -> (String, usize) {
        let mut word = String::new();
        while let Some((letter, end)) = self.character(at).filter(|(letter, _)| is_word(*letter)) {
            word.push(letter);
            at = end;
        }
        (word, at)
    }

    /// Whether what follows a `<` in a directive, up to a `>`, would be something else if it were no header's name.
    /// `__has_include` may come from a macro, so what is before the `<` doesn't tell.
    fn may_be_header_name(&self, from: usize) -> bool {
        let line = &self.source[from..self.end_of_line(from)];
        let Some((name, _)) = line.split_once('>') else { return false };
        name.contains(['"', '\'', '\\']) || name.contains("//") || name.contains("/*")
    }
}

fn is_delimiter(text: &str) -> bool {
    text.len() <= 16 && !text.contains(|c: char| c.is_whitespace() || matches!(c, ')' | '\\' | '"'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every token that is no white space, comments in braces.
    fn cut(source: &str, dialect: Dialect) -> Vec<String> {
        let shown = |token: &Token| match token.kind {
            Kind::Space => None,
            Kind::Comment => Some(format!("{{{}}}", &source[token.range.clone()])),
            _ => Some(source[token.range.clone()].to_owned()),
        };
        tokens(source, dialect).all.iter().filter_map(shown).collect()
    }

    fn both(source: &str, expected: &[&str]) {
        for dialect in [Dialect::Edg, Dialect::Gcc] {
            assert_eq!(cut(source, dialect), expected, "{source} {dialect:?}");
            assert_eq!(tokens(source, dialect).doubtful, None, "{source} {dialect:?}");
        }
    }

    #[test]
    fn raw_strings_end_with_their_delimiter() {
        both("R\"(/*)\" a", &["R\"(/*)\"", "a"]);
        both("u8R\"x()\" //)x\"_s b", &["u8R\"x()\" //)x\"", "_s", "b"]);
        both("LR\"(\\\n\")\" c", &["LR\"(\\\n\")\"", "c"]);
        both("FOOR\"(\" // d", &["FOOR", "\"(\"", "{// d}"]);
        both("R \"(\" // d", &["R", "\"(\"", "{// d}"]);
        both("\\\nR\"(//)\"", &["R\"(//)\""]);
    }

    #[test]
    fn lines_are_joined() {
        both("// a \\\n b\nc", &["{// a \\\n b}", "c"]);
        both("/\\\n/ a\nb", &["{/\\\n/ a}", "b"]);
        both("/\\\n* a *\\\n/ b", &["{/\\\n* a *\\\n/}", "b"]);
        both("\"a\\\n// \" b", &["\"a\\\n// \"", "b"]);
        both("as\\\r\nm // c", &["as\\\r\nm", "{// c}"]);
    }

    #[test]
    fn the_dialects_differ_in_blanks_and_carriage_returns() {
        let source = "// a \\ \nb";
        assert_eq!(cut(source, Dialect::Edg), ["{// a \\ }", "b"]);
        assert_eq!(cut(source, Dialect::Gcc), ["{// a \\ \nb}"]);
        let source = "// a\rb";
        assert_eq!(cut(source, Dialect::Edg), ["{// a\rb}"]);
        assert_eq!(cut(source, Dialect::Gcc), ["{// a}", "b"]);
    }

    #[test]
    fn characters_digits_and_digraphs() {
        both("case'/*': 1'000'/*'", &["case", "'/*'", ":", "1'000", "'/*'"]);
        both("0x1p-3+1.e+5", &["0x1p-3", "+", "1.e+5"]);
        both("'\"' '\\'' // \"", &["'\"'", "'\\''", "{// \"}"]);
        both("a<:'/*':> %> //", &["a", "<", ":", "'/*'", ":", ">", "%", ">", "{//}"]);
        both("// ??/\nb", &["{// ??/}", "b"]);
        both("#error don't /*\nb", &["#", "error", "don", "'t /*", "b"]);
    }

    #[test]
    fn what_depends_on_macros_or_skipped_lines_is_doubtful() {
        for source in [
            "a\n#if __has_include(</*>)",
            "a\n%:if H(<//>)",
            "a\n/* b */ # include <x/*>",
            "#if 0\nR\"(\n#endif\n)\" /* \"; code",
            "é\u{301}R\"(x)\"",
            "$R\"(x)\"",
            "R\"a b(x)a b\"",
        ] {
            for dialect in [Dialect::Edg, Dialect::Gcc] {
                assert!(tokens(source, dialect).doubtful.is_some(), "{source}");
            }
        }
        both("#include <a/b.h> // why", &["#", "include", "<", "a", "/", "b", ".", "h", ">", "{// why}"]);
        both("#if A < B // why\na < b // > c", &["#", "if", "A", "<", "B", "{// why}", "a", "<", "b", "{// > c}"]);
    }

    proptest! {
        #[test]
        fn tokens_have_no_gaps(source in "\\PC{0,40}(/\\*|//|\\*/|\"|'|\\\\|\n|\r|R\"\\(|\\)\"|x|1|#if|<|>| ){0,30}") {
            for dialect in [Dialect::Edg, Dialect::Gcc] {
                let mut at = 0;
                for token in tokens(&source, dialect).all {
                    prop_assert_eq!(token.range.start, at);
                    prop_assert!(token.range.end > at);
                    at = token.range.end;
                }
                prop_assert_eq!(at, source.len());
            }
        }
    }
}
