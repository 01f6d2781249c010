//! Ways to damage bytes.

use super::*;

/// A way to damage bytes; places are parts of 65,536 of their length.
#[derive(Clone, Debug)]
pub(super) enum Damage {
    Flip { place: u16, bit: u8 },
    Cut { from: u16, length: u16 },
    Insert { place: u16, what: Vec<u8> },
    Repeat { place: u16, length: u16, times: u16 },
    Copy { from: u16, length: u16, to: u16 },
    Number { place: u16, text: &'static str },
    Truncate { place: u16 },
}

/// What breaks programs that read text.
pub(super) const HURTFUL: [&str; 36] = [
    "..",
    "../../x",
    "/",
    "\0",
    "\u{202e}",
    "é",
    "\u{feff}",
    "\r\n",
    "\n",
    "\t",
    "  ",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "'",
    ":",
    ": ",
    "- ",
    "&a ",
    "*a",
    "<<: *a\n",
    "!!binary ",
    "|\n",
    "? ",
    "#",
    "@",
    "${params.x}",
    "${",
    "null",
    "true",
    "~",
    "{}",
    "[]",
    "\u{10ffff}",
];
pub(super) const NUMBERS: [&str; 14] = [
    "0",
    "-1",
    "1e999",
    "-0.0",
    "NaN",
    ".inf",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e300",
    "0x7fffffff",
    "200000000000000d",
    "99999999999999999999999999999999",
];

pub(super) fn damage() -> impl Strategy<Value = Damage> {
    let hurtful = prop::sample::select(&HURTFUL[..]).prop_map(|text| text.as_bytes().to_vec());
    let short = 0u16..600;
    prop_oneof![
        2 => (any::<u16>(), 0u8..8).prop_map(|(place, bit)| Damage::Flip { place, bit }),
        2 => (any::<u16>(), short.clone()).prop_map(|(from, length)| Damage::Cut { from, length }),
        3 => (any::<u16>(), hurtful).prop_map(|(place, what)| Damage::Insert { place, what }),
        1 => (any::<u16>(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(place, what)| Damage::Insert { place, what }),
        1 => (any::<u16>(), 0u16..40, prop_oneof![1u16..4, 1000u16..20000])
            .prop_map(|(place, length, times)| Damage::Repeat { place, length, times }),
        2 => (any::<u16>(), short, any::<u16>()).prop_map(|(from, length, to)| Damage::Copy { from, length, to }),
        2 => (any::<u16>(), prop::sample::select(&NUMBERS[..])).prop_map(|(place, text)| Damage::Number { place, text }),
        1 => any::<u16>().prop_map(|place| Damage::Truncate { place }),
    ]
}

pub(super) fn damaged(examples: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let example = prop::sample::select(examples);
    (example, prop::collection::vec(damage(), 0..6)).prop_map(|(mut bytes, all)| {
        all.iter().for_each(|damage| damage.apply(&mut bytes));
        bytes.truncate(1 << 20);
        bytes
    })
}

impl Damage {
    pub(super) fn apply(&self, bytes: &mut Vec<u8>) {
        let total = bytes.len();
        let at = |place: u16| total * usize::from(place) / 65_536;
        let span = |from: u16, length: u16| at(from)..(at(from) + usize::from(length)).min(total);
        match self {
            Self::Flip { place, bit } => bytes.get_mut(at(*place)).into_iter().for_each(|byte| *byte ^= 1 << bit),
            Self::Cut { from, length } => drop(bytes.drain(span(*from, *length))),
            Self::Insert { place, what } => drop(bytes.splice(at(*place)..at(*place), what.iter().copied())),
            Self::Repeat { place, length, times } => {
                let what = bytes[span(*place, *length)].repeat(usize::from(*times));
                bytes.splice(at(*place)..at(*place), what);
            }
            Self::Copy { from, length, to } => {
                let what = bytes[span(*from, *length)].to_vec();
                bytes.splice(at(*to)..at(*to), what);
            }
            // The next digits are replaced.
            Self::Number { place, text } => {
                let Some(from) = bytes[at(*place)..].iter().position(u8::is_ascii_digit) else { return };
                let from = at(*place) + from;
                let length = bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                bytes.splice(from..from + length, text.bytes());
            }
            Self::Truncate { place } => bytes.truncate(at(*place)),
        }
    }
}
