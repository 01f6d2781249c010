//! Which texts may be names. Names of ports and tags become names of files and objects, so what comes out of a store is
//! checked by the same rules as what somebody writes.

/// `[A-Za-z_][A-Za-z0-9_-]*`: names of stages, ports, parameters and axes, which also serve as file names.
pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

/// What the two parts of a tag may be.
pub const TAG_PARTS: &str = "letters, digits, `_`, `-` and `.` on both sides, and not dots alone: `ops@v1`";

/// Whether a text may be the name or the tag of `NAME@TAG`. Both are parts of an object's name, where `..` would lead to
/// another one.
pub fn is_tag_part(text: &str) -> bool {
    const LONGEST: usize = 200;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    text.len() <= LONGEST && text.chars().all(plain) && text.chars().any(|c| c != '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere() {
        for good in ["ops", "v1", "v1.0", ".v1", "a..b", "_-", "7"] {
            assert!(is_tag_part(good), "{good}");
        }
        for bad in ["", ".", "..", "...", "a/b", "a@b", "a b", "é", "\0", "..\\x"] {
            assert!(!is_tag_part(bad) && !is_name(bad), "{bad:?}");
        }
        assert!(!is_tag_part(&"a".repeat(201)));
        assert!(is_name("a-b_1") && !is_name("1a") && !is_name("a.b") && !is_name("-a"));
    }
}
