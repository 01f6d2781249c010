//! Chat templates: Jinja as transformers runs it.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, Value, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json, json};

use crate::TrainError;
use crate::text::json::{Style, dumps};

/// A compiled chat template.
///
/// Not supported: the tag `generation`, and Python methods that `minijinja-contrib` doesn't have. Both are errors with
/// the place in the template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the like, which templates may name.
    special_tokens: Map<String, Json>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a template's source. `special_tokens` are texts by the names of `tokenizer_config.json`.
    pub fn new(source: &str, special_tokens: Map<String, Json>) -> Result<Self, TrainError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(described)?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source.to_owned()).map_err(described)?;
        Ok(Self { environment, special_tokens })
    }

    /// The text of a conversation. `messages` is a list of objects with `role` and `content`; `settings` are further names
    /// for the template: `tools`, `enable_thinking`.
    pub fn render(
        &self,
        messages: &[Json],
        add_generation_prompt: bool,
        settings: &Map<String, Json>,
    ) -> Result<String, TrainError> {
        let messages: Vec<Json> = messages.iter().map(with_reasoning).collect();
        let mut context = self.special_tokens.clone();
        context.insert("tools".into(), Json::Null);
        context.insert("documents".into(), Json::Null);
        context.extend(settings.clone());
        context.insert("messages".into(), json!(messages));
        context.insert("add_generation_prompt".into(), json!(add_generation_prompt));
        let template = self.environment.get_template(NAME).map_err(described)?;
        template.render(Value::from(Serde(context))).map_err(described)
    }
}

fn described(error: Error) -> TrainError {
    let place = error.line().map(|line| format!(", line {line}")).unwrap_or_default();
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    TrainError::new(format!("chat template{place}: {detail}"))
}

/// Thoughts under the names that templates read, as transformers fills them: it takes `reasoning_content`, `thinking` or
/// `reasoning`, and gives `reasoning_content` and `thinking`.
fn with_reasoning(message: &Json) -> Json {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let found = names.iter().find_map(|name| message.get(name).filter(|value| !value.is_null()));
    let (Some(thoughts), Some(object)) = (found, message.as_object()) else { return message.clone() };
    let mut filled = object.clone();
    filled.entry("thinking").or_insert_with(|| thoughts.clone());
    filled.insert("reasoning_content".into(), thoughts.clone());
    Json::Object(filled)
}

/// transformers' `tojson`: Python's `json.dumps` without escapes for HTML.
fn to_json(value: Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (positional, arguments): (&[Value], Kwargs) = from_args(&arguments)?;
    if !positional.is_empty() {
        return Err(Error::new(ErrorKind::TooManyArguments, "tojson takes its settings by name"));
    }
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let style = Style {
        indent: arguments.get::<Option<usize>>("indent")?,
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        separators: separators.and_then(|pair| <[String; 2]>::try_from(pair).ok()).map(|[item, name]| (item, name)),
    };
    arguments.assert_all_used()?;
    let json =
        serde_json::to_value(&value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(dumps(&json, &style))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: Json) -> Result<String, TrainError> {
        ChatTemplate::new(source, Map::new())?.render(messages.as_array().unwrap(), true, &Map::new())
    }

    #[test]
    fn errors_of_templates_say_where() {
        let raised = render("one\n{{ raise_exception('roles must alternate') }}", json!([])).unwrap_err();
        assert_eq!(raised.message, "chat template, line 2: roles must alternate");
        let broken = ChatTemplate::new("{% if %}", Map::new()).err().unwrap();
        assert!(broken.message.starts_with("chat template, line 1: "), "{broken}");
    }

    #[test]
    fn names_of_objects_keep_their_order() {
        let text =
            render("{{ messages[0] | tojson }}", json!([{"role": "user", "content": "<b>&'", "a": 1.0}])).unwrap();
        assert_eq!(text, r#"{"role": "user", "content": "<b>&'", "a": 1.0}"#);
    }

    #[test]
    fn thoughts_have_the_names_that_templates_read() {
        let source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}";
        let messages = json!([{"reasoning": "r"}, {"thinking": "t"}, {"reasoning_content": "c", "thinking": "t"}]);
        assert_eq!(render(source, messages).unwrap(), "r|r;t|t;c|t;");
    }
}
