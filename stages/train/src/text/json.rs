//! JSON as Python's `json.dumps` writes it: the `tojson` of chat templates. Models were trained on these very spaces.

use serde_json::Value;

/// How to write.
#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    /// Spaces of one level; none for a single line.
    pub indent: Option<usize>,
    /// Names of objects in order.
    pub sort_keys: bool,
    /// Between items and after names; Python's own where none are given.
    pub separators: Option<(String, String)>,
    /// Characters beyond ASCII as `\u` escapes.
    pub ensure_ascii: bool,
}

/// The text of a value.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let mut text = String::new();
    let default_item = if style.indent.is_some() { "," } else { ", " };
    let (item, name) = match &style.separators {
        Some((item, name)) => (item.as_str(), name.as_str()),
        None => (default_item, ": "),
    };
    Writer { style, item, name }.write(value, 0, &mut text);
    text
}

struct Writer<'a> {
    style: &'a Style,
    item: &'a str,
    name: &'a str,
}

impl Writer<'_> {
    fn write(&self, value: &Value, level: usize, text: &mut String) {
        match value {
            Value::Null => text.push_str("null"),
            Value::Bool(flag) => text.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => text.push_str(&python_float(float)),
                None => text.push_str(&number.to_string()),
            },
            Value::String(string) => self.quote(string, text),
            Value::Array(items) => {
                self.between('[', ']', items.iter(), level, text, |item, level, text| self.write(item, level, text));
            }
            Value::Object(map) => {
                let mut fields: Vec<_> = map.iter().collect();
                if self.style.sort_keys {
                    fields.sort_unstable_by_key(|(name, _)| *name);
                }
                self.between('{', '}', fields.into_iter(), level, text, |(name, value), level, text| {
                    self.quote(name, text);
                    text.push_str(self.name);
                    self.write(value, level, text);
                });
            }
        }
    }

    fn between<T>(
        &self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        level: usize,
        text: &mut String,
        write: impl Fn(T, usize, &mut String),
    ) {
        text.push(open);
        let is_empty = items.len() == 0;
        for (number, item) in items.enumerate() {
            if number > 0 {
                text.push_str(self.item);
            }
            self.new_line(level + 1, text);
            write(item, level + 1, text);
        }
        if !is_empty {
            self.new_line(level, text);
        }
        text.push(close);
    }

    fn new_line(&self, level: usize, text: &mut String) {
        if let Some(indent) = self.style.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    fn quote(&self, string: &str, text: &mut String) {
        text.push('"');
        for character in string.chars() {
            match character {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                control if (control as u32) < 0x20 => text.push_str(&format!("\\u{:04x}", control as u32)),
                // DEL is ASCII: Python leaves it as it is.
                other if self.style.ensure_ascii && !other.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in other.encode_utf16(&mut units) {
                        text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                other => text.push(other),
            }
        }
        text.push('"');
    }
}

/// A float as Python's `repr` writes it: the same shortest digits as Rust's, with an exponent below 1e-4 and from 1e16.
fn python_float(number: f64) -> String {
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').expect("the format has one");
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{number:?}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn writes_what_python_writes() {
        let value = json!({"b": [1, 2.0, 1e-5, 1e16, 1.5e300, 0.0001, -0.0], "a": {"é\"\n\u{1}\u{7f}😀": null}, "c": [], "d": {}});
        let line = dumps(&value, &Style::default());
        assert_eq!(
            line,
            "{\"b\": [1, 2.0, 1e-05, 1e+16, 1.5e+300, 0.0001, -0.0], \"a\": {\"é\\\"\\n\\u0001\u{7f}😀\": null}, \"c\": [], \"d\": {}}"
        );
        let style = Style { indent: Some(2), sort_keys: true, ensure_ascii: true, separators: None };
        let nested = dumps(&json!({"b": [1, {}], "a": "é😀"}), &style);
        assert_eq!(nested, "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\",\n  \"b\": [\n    1,\n    {}\n  ]\n}");
        let tight = Style { separators: Some((",".into(), ":".into())), ..Style::default() };
        assert_eq!(dumps(&json!({"a": [1, 2]}), &tight), "{\"a\":[1,2]}");
    }
}
