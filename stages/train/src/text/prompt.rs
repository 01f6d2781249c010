//! Conversations to prompts, for policies that append: what was given and sampled is never encoded again.

use serde_json::{Map, Value, json};

use crate::TrainError;
use crate::text::Tokenizer;

/// Marks a place in a message's content, to be found in the rendered text. Of characters for private use: no template
/// and no tokenizer looks at it, since it never gets there.
const MARK: &str = "\u{e0c7}\u{e0a6}\u{e0c7}";

/// Ids that stand for the first messages of a conversation.
#[derive(Clone, Copy, Debug)]
pub struct Begin<'a> {
    /// The ids.
    pub ids: &'a [i64],
    /// How many messages they stand for; the last of these is the assistant's.
    pub messages: usize,
}

impl Tokenizer {
    /// The ids of a conversation, ready for the assistant to speak. Where the last message is the assistant's, they end
    /// with its content, to be continued. With `begin` they are its ids, what the template puts between the end of the
    /// last of its messages and the end of the conversation, without the token that ends a turn where the ids end with it.
    pub fn prompt(
        &self,
        messages: &[Value],
        begin: Option<Begin>,
        settings: &Map<String, Value>,
    ) -> Result<Vec<i64>, TrainError> {
        let last = messages.last().ok_or_else(|| TrainError::new("a conversation without a message"))?;
        let continues = last["role"] == "assistant";
        let mut marked = messages.to_vec();
        if continues {
            mark(&mut marked, messages.len() - 1)?;
        }
        let Some(begin) = begin else {
            let text = self.render(&marked, !continues, settings)?;
            let end = if continues { place_of_mark(&text)? } else { text.len() };
            return Ok(self.encode_rendered(&text[..end]));
        };
        let spoken = begin.messages.checked_sub(1).filter(|&index| messages.get(index).is_some_and(is_assistant));
        let spoken = spoken.ok_or_else(|| {
            TrainError::new(format!("ids for {} messages, the last of which is not the assistant's", begin.messages))
        })?;
        if continues && spoken == messages.len() - 1 {
            return Ok(begin.ids.to_vec());
        }
        mark(&mut marked, spoken)?;
        let text = self.render(&marked, !continues, settings)?;
        let start = text.find(MARK).ok_or_else(no_mark)? + MARK.len();
        let rest = &text[start..];
        let end = if continues { place_of_mark(rest)? } else { rest.len() };
        let rest = self.encode_rendered(&rest[..end]);
        let has_ended = begin.ids.last().is_some_and(|id| rest.first() == Some(id));
        Ok([begin.ids, &rest[usize::from(has_ended)..]].concat())
    }
}

fn is_assistant(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// Puts the mark at the end of a message's content.
fn mark(messages: &mut [Value], index: usize) -> Result<(), TrainError> {
    let content = messages[index]["content"].as_str();
    let content = content.ok_or_else(|| TrainError::new(format!("message {}: content must be a text", index + 1)))?;
    messages[index]["content"] = json!(format!("{content}{MARK}"));
    Ok(())
}

fn place_of_mark(text: &str) -> Result<usize, TrainError> {
    text.rfind(MARK).ok_or_else(no_mark)
}

fn no_mark() -> TrainError {
    TrainError::new("the chat template leaves out what the assistant said")
}
