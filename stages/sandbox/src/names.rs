//! The names that people give functions, from those that the compiler gives them.

/// `_Z4reluPKfPf` is `relu`, `_ZN3net4reluEPf` is `net::relu`, a template's arguments become `<…>`; anything else stays.
pub fn demangle(symbol: &str) -> String {
    let Some(mangled) = symbol.strip_prefix("_Z") else { return symbol.to_owned() };
    // A class's tables and type information count as the class.
    let mangled = ["TI", "TS", "TV", "TT"].iter().find_map(|table| mangled.strip_prefix(table)).unwrap_or(mangled);
    let parts = match mangled.strip_prefix('N') {
        Some(nested) => parts_of(nested, usize::MAX),
        None => parts_of(mangled.strip_prefix('L').unwrap_or(mangled), 1),
    };
    if parts.is_empty() { symbol.to_owned() } else { parts.join("::") }
}

fn parts_of(mut rest: &str, most: usize) -> Vec<String> {
    rest = rest.strip_prefix('K').unwrap_or(rest);
    let mut parts = Vec::new();
    let mut most = most;
    if let Some(standard) = rest.strip_prefix("St") {
        (parts, rest, most) = (vec!["std".to_owned()], standard, most.saturating_add(1));
    }
    while let Some((name, after)) = part(rest).filter(|_| parts.len() < most) {
        parts.push(templated(name, after));
        rest = after;
    }
    if parts == ["std"] { Vec::new() } else { parts }
}

fn templated(name: &str, rest: &str) -> String {
    if rest.starts_with('I') { format!("{name}<…>") } else { name.to_owned() }
}

/// A length and as many bytes.
fn part(text: &str) -> Option<(&str, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let length = text[..digits].parse().ok().filter(|length: &usize| *length > 0)?;
    let name = text.get(digits..digits.checked_add(length)?)?;
    Some((name, &text[digits + length..]))
}

/// The line of a source where a word first stands alone, counted from one. Included names don't count.
pub fn line_of_word(source: &str, word: &str) -> Option<u32> {
    let is_letter = |character: char| character.is_alphanumeric() || character == '_';
    let stands_in = |line: &str| {
        !line.trim_start().starts_with("#include")
            && line.split(|character| !is_letter(character)).any(|found| found == word)
    };
    let line = source.lines().position(stands_in)?;
    u32::try_from(line + 1).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told() {
        for (symbol, name) in [
            ("relu", "relu"),
            ("_Z4reluPKfPf", "relu"),
            ("_ZL4reluPKfPf", "relu"),
            ("_Z4reluIfEvPKT_", "relu<…>"),
            ("_ZN3net4reluEPf", "net::relu"),
            ("_ZNSt6thread6detachEv", "std::thread::detach"),
            ("_ZTINSt6thread6_StateE", "std::thread::_State"),
            ("_ZTTSt14basic_ofstreamIcSt11char_traitsIcEE", "std::basic_ofstream<…>"),
            ("_ZSt20__throw_length_errorPKc", "std::__throw_length_error"),
            ("_ZSt4endlIcSt11char_traitsIcEERSt13basic_ostreamIT_T0_ES6_", "std::endl<…>"),
            ("_ZSt", "_ZSt"),
            ("_Z99relu", "_Z99relu"),
            ("_Z", "_Z"),
        ] {
            assert_eq!(demangle(symbol), name);
        }
    }

    #[test]
    fn words_stand_alone() {
        assert_eq!(line_of_word("int systems;\nsystem(\"ls\");", "system"), Some(2));
        assert_eq!(line_of_word("#include <sys/socket.h>\nsocket(1, 2, 3);", "socket"), Some(2));
        assert_eq!(line_of_word("int systems;", "system"), None);
    }

    proptest::proptest! {
        #[test]
        fn any_symbol_has_a_name(symbol in "_Z[NL0-9a-zE é]{0,20}") {
            assert!(!demangle(&symbol).is_empty());
        }
    }
}
