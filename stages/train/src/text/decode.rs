//! Text of a growing list of tokens. A character may take several tokens, and a token's text may depend on the one before.

use crate::text::tokenizer::Tokenizer;

/// Decodes tokens as they arrive. The pieces, joined, are the text of all tokens at once.
#[derive(Clone, Debug, Default)]
pub struct Incremental {
    ids: Vec<i64>,
    /// Where the last piece's tokens begin: they are decoded again with the next ones, for what depends on them.
    previous: usize,
    /// Up to where text was given out.
    given: usize,
    skip_special: bool,
}

impl Incremental {
    /// Nothing yet. With `skip_special`, special tokens have no text.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, ..Self::default() }
    }

    /// Takes a token, and returns the text that is certain now: nothing while a character is incomplete.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: i64) -> String {
        self.ids.push(id);
        let text = self.text(tokenizer, self.ids.len());
        if text.ends_with('\u{fffd}') {
            return String::new();
        }
        self.take(tokenizer, text)
    }

    /// The rest at the end of the tokens: an incomplete character is U+FFFD.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let text = self.text(tokenizer, self.ids.len());
        self.take(tokenizer, text)
    }

    fn take(&mut self, tokenizer: &Tokenizer, text: String) -> String {
        let old = self.text(tokenizer, self.given);
        let Some(piece) = text.strip_prefix(&old).map(str::to_owned) else { return String::new() };
        // A token without a text, like a special one, doesn't end the piece that the next token may depend on.
        if !piece.is_empty() {
            self.previous = self.given;
        }
        self.given = self.ids.len();
        piece
    }

    /// Text of the tokens from the last piece on, up to `end`.
    fn text(&self, tokenizer: &Tokenizer, end: usize) -> String {
        let ids = &self.ids[self.previous..end];
        if self.skip_special { tokenizer.decode_plain(ids) } else { tokenizer.decode(ids) }
    }
}
