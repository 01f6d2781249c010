//! Stop strings, found in text that arrives in pieces.

/// What became of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// No stop string yet: this text is certain not to belong to one.
    No(String),
    /// A stop string was complete: this is the rest of the text before it. Nothing may be pushed any more.
    Yes(String),
}

/// Looks for stop strings. Text that may be the begin of one is held back until it is decided.
#[derive(Clone, Debug)]
pub struct Stop {
    strings: Vec<String>,
    held: String,
}

impl Stop {
    /// Watches for these strings; empty ones are left out.
    pub fn new(strings: &[String]) -> Self {
        Self { strings: strings.iter().filter(|string| !string.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Takes a piece of text.
    pub fn push(&mut self, piece: &str) -> Stopped {
        self.held.push_str(piece);
        let found = self.strings.iter().filter_map(|string| self.held.find(string)).min();
        if let Some(place) = found {
            self.held.truncate(place);
            return Stopped::Yes(std::mem::take(&mut self.held));
        }
        let kept = self.strings.iter().map(|string| overlap(&self.held, string)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        Stopped::No(std::mem::replace(&mut self.held, rest))
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that a stop string begins with.
fn overlap(text: &str, string: &str) -> usize {
    let begins = string.char_indices().map(|(place, _)| place).skip(1);
    begins.filter(|&length| text.ends_with(&string[..length])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Text before the earliest stop string, as pieces gave it.
    fn pieces(pieces: &[String], strings: &[String]) -> (String, bool) {
        let mut stop = Stop::new(strings);
        let mut text = String::new();
        for piece in pieces {
            match stop.push(piece) {
                Stopped::No(more) => text.push_str(&more),
                Stopped::Yes(rest) => return (text + &rest, true),
            }
        }
        (text + &stop.finish(), false)
    }

    #[test]
    fn a_begin_is_held_back_and_given_out_when_it_was_none() {
        let mut stop = Stop::new(&["```".into(), String::new()]);
        assert_eq!(stop.push("a``"), Stopped::No("a".into()));
        assert_eq!(stop.push("b`"), Stopped::No("``b".into()));
        assert_eq!(stop.push("``rest"), Stopped::Yes(String::new()));
    }

    proptest! {
        /// However a text is cut into pieces, what is given out is the text before the first stop string that is complete.
        #[test]
        fn cuts_change_nothing(cut in prop::collection::vec("[abé]{0,3}", 0..8), strings in prop::collection::vec("[abé]{1,3}", 0..3)) {
            let (text, stopped) = pieces(&cut, &strings);
            let whole = cut.concat();
            let (at_once, stopped_at_once) = pieces(std::slice::from_ref(&whole), &strings);
            prop_assert_eq!(stopped, stopped_at_once);
            if stopped {
                // Pieces see the string that ends first, the whole text the one that begins first: both end before one.
                prop_assert!(whole.starts_with(&text) && text.len() >= at_once.len());
                prop_assert!(strings.iter().any(|string| whole[text.len()..].starts_with(string.as_str())));
            } else {
                prop_assert_eq!(text, whole);
            }
        }
    }
}
