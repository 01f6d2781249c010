//! `config.json` of the decoders that are supported: Llama, Qwen2, Qwen3.
//!
//! What would change the result and isn't supported is an error that names the field: a model that is computed a
//! little wrong trains as if it were right.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use tch::Kind;

use crate::TrainError;
use crate::model::Head;

/// Which architecture a model has; the differences are the fields of [`Config`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `LlamaForCausalLM`: no biases unless `attention_bias` or `mlp_bias`.
    Llama,
    /// `Qwen2ForCausalLM`: biases of queries, keys and values.
    Qwen2,
    /// `Qwen3ForCausalLM`: RMS norms of each head's queries and keys.
    Qwen3,
}

impl Family {
    /// The name that transformers' classes begin with.
    pub fn class(self) -> &'static str {
        match self {
            Self::Llama => "Llama",
            Self::Qwen2 => "Qwen2",
            Self::Qwen3 => "Qwen3",
        }
    }
}

/// How the frequencies of the rotary embedding are changed for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// What they are divided by.
        factor: f64,
    },
    /// Llama 3.1's: long wavelengths divided by `factor`, short ones kept, those between interpolated.
    Llama3 {
        /// What long wavelengths are divided by.
        factor: f64,
        /// Wavelengths above `original / low` are long.
        low: f64,
        /// Wavelengths below `original / high` are short.
        high: f64,
        /// Positions the model was trained with first.
        original: f64,
    },
}

/// What the forward pass of a decoder needs to know. Sizes are numbers of elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The architecture.
    pub family: Family,
    /// Rows of the embedding.
    pub vocabulary: i64,
    /// Width of the residual stream.
    pub hidden: i64,
    /// Width inside the feed-forward block.
    pub intermediate: i64,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: i64,
    /// Key and value heads; divides `heads`.
    pub key_value_heads: i64,
    /// Width of a head.
    pub head_width: i64,
    /// The most positions a sequence may have.
    pub max_positions: i64,
    /// Added to the mean square in RMS norms.
    pub norm_epsilon: f64,
    /// Standard deviation of newly drawn weights.
    pub initializer_range: f64,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// Its scaling.
    pub rope_scaling: Scaling,
    /// Whether queries, keys and values have biases.
    pub query_key_value_bias: bool,
    /// Whether the attention's output projection has one.
    pub output_bias: bool,
    /// Whether the three projections of the feed-forward block have them.
    pub feed_forward_bias: bool,
    /// Whether each head's queries and keys are normalised (Qwen3).
    pub query_key_norm: bool,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// The whole file, for writing it again with fields that are not read here.
    json: Map<String, Value>,
}

/// A field of the file, with errors that name it.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn whole(&self, name: &str, default: Option<i64>) -> Result<i64, TrainError> {
        match self.get(name) {
            None => default.ok_or_else(|| TrainError::new(format!("{name} is missing"))),
            Some(value) => value
                .as_i64()
                .filter(|number| *number > 0)
                .ok_or_else(|| TrainError::new(format!("{name}: expected a positive whole number, found {value}"))),
        }
    }

    fn number(&self, name: &str, default: f64) -> Result<f64, TrainError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|number| number.is_finite() && *number > 0.0)
                .ok_or_else(|| TrainError::new(format!("{name}: expected a positive number, found {value}"))),
        }
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, TrainError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => {
                value.as_bool().ok_or_else(|| TrainError::new(format!("{name}: expected true or false, found {value}")))
            }
        }
    }

    fn text(&self, name: &str) -> Result<Option<&str>, TrainError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_str()
                .map(Some)
                .ok_or_else(|| TrainError::new(format!("{name}: expected a text, found {value}"))),
        }
    }

    /// Fails where a field has another value than the only one that is supported.
    fn only(&self, name: &str, supported: &[Value]) -> Result<(), TrainError> {
        match self.get(name) {
            Some(value) if !supported.contains(value) => {
                let others = match supported.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ") {
                    none if none.is_empty() => none,
                    list => format!(", only {list}"),
                };
                Err(TrainError::new(format!("{name}: {value} is not supported{others}")))
            }
            _ => Ok(()),
        }
    }
}

impl Config {
    /// Reads `config.json` in a model's folder. Errors name the file and the field.
    pub fn read(folder: &Path) -> Result<Self, TrainError> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path).map_err(TrainError::file(&path))?;
        let json: Value = serde_json::from_str(&text).map_err(TrainError::file(&path))?;
        Self::from_json(&json).map_err(|error| TrainError::new(format!("{}: {error}", path.display())))
    }

    /// The configuration in the form of `config.json`, with transformers' defaults for what it leaves out.
    pub fn from_json(json: &Value) -> Result<Self, TrainError> {
        let json = json.as_object().ok_or_else(|| TrainError::new("expected an object"))?;
        let fields = Fields(json);
        let family = family(&fields)?;
        refuse_unsupported(&fields)?;
        let hidden = fields.whole("hidden_size", None)?;
        let heads = fields.whole("num_attention_heads", None)?;
        let key_value_heads = fields.whole("num_key_value_heads", Some(heads))?;
        if heads % key_value_heads != 0 {
            return Err(TrainError::new(format!(
                "num_key_value_heads: {key_value_heads} doesn't divide {heads} heads"
            )));
        }
        let head_width = match family {
            Family::Qwen3 => fields.whole("head_dim", Some(128))?,
            _ => fields.whole("head_dim", Some(hidden / heads))?,
        };
        if head_width % 2 != 0 {
            return Err(TrainError::new(format!("head_dim: {head_width} is odd, the rotary embedding needs pairs")));
        }
        let max_positions = fields.whole("max_position_embeddings", Some(2048))?;
        let (rope_theta, rope_scaling) = rope(&fields, max_positions)?;
        let attention_bias = fields.flag("attention_bias", false)?;
        Ok(Self {
            family,
            vocabulary: fields.whole("vocab_size", None)?,
            hidden,
            intermediate: fields.whole("intermediate_size", None)?,
            layers: fields.whole("num_hidden_layers", None)? as usize,
            heads,
            key_value_heads,
            head_width,
            max_positions,
            norm_epsilon: fields.number("rms_norm_eps", 1e-6)?,
            initializer_range: fields.number("initializer_range", 0.02)?,
            rope_theta,
            rope_scaling,
            query_key_value_bias: family == Family::Qwen2 || attention_bias,
            output_bias: family != Family::Qwen2 && attention_bias,
            feed_forward_bias: family == Family::Llama && fields.flag("mlp_bias", false)?,
            query_key_norm: family == Family::Qwen3,
            tied: fields.flag("tie_word_embeddings", false)?,
            json: json.clone(),
        })
    }

    /// The form of `config.json` for a model with this head whose weights are stored as `kind`. Equal to what was read
    /// where nothing of that changes.
    pub fn to_json(&self, head: Head, kind: Kind) -> Value {
        let mut json = self.json.clone();
        let class = match head {
            Head::Language => format!("{}ForCausalLM", self.family.class()),
            Head::Value => format!("{}ForTokenClassification", self.family.class()),
        };
        json.insert("architectures".into(), json!([class]));
        json.insert("model_type".into(), json!(self.family.class().to_lowercase()));
        let dtype = if kind == Kind::BFloat16 { "bfloat16" } else { "float32" };
        let name = if json.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        json.insert(name.into(), json!(dtype));
        if head == Head::Value {
            json.insert("id2label".into(), json!({"0": "LABEL_0"}));
            json.insert("label2id".into(), json!({"LABEL_0": 0}));
        } else {
            json.remove("id2label");
            json.remove("label2id");
        }
        Value::Object(json)
    }

    /// Width of all queries together.
    pub fn query_width(&self) -> i64 {
        self.heads * self.head_width
    }

    /// Width of all keys together, which is that of all values.
    pub fn key_value_width(&self) -> i64 {
        self.key_value_heads * self.head_width
    }
}

fn family(fields: &Fields) -> Result<Family, TrainError> {
    match fields.text("model_type")? {
        Some("llama") => Ok(Family::Llama),
        Some("qwen2") => Ok(Family::Qwen2),
        Some("qwen3") => Ok(Family::Qwen3),
        Some(other) => {
            Err(TrainError::new(format!("model_type: \"{other}\" is not supported, only llama, qwen2 and qwen3")))
        }
        None => Err(TrainError::new("model_type is missing")),
    }
}

/// Fails on fields that change what a model computes, in ways this forward pass doesn't have.
fn refuse_unsupported(fields: &Fields) -> Result<(), TrainError> {
    fields.only("hidden_act", &[json!("silu"), json!("swish")])?;
    fields.only("use_sliding_window", &[json!(false)])?;
    fields.only("attention_dropout", &[json!(0), json!(0.0)])?;
    fields.only("partial_rotary_factor", &[json!(1), json!(1.0)])?;
    fields.only("quantization_config", &[])?;
    if let Some(types) = fields.get("layer_types") {
        let full = types.as_array().is_some_and(|types| types.iter().all(|kind| kind == "full_attention"));
        if !full {
            return Err(TrainError::new(format!("layer_types: {types} is not supported, only full_attention")));
        }
    }
    Ok(())
}

/// The base and scaling of the rotary embedding. transformers 5 writes `rope_parameters`, versions before it
/// `rope_theta` and `rope_scaling`.
fn rope(fields: &Fields, max_positions: i64) -> Result<(f64, Scaling), TrainError> {
    let (name, parameters) = match (fields.get("rope_parameters"), fields.get("rope_scaling")) {
        (Some(value), _) => ("rope_parameters", value.clone()),
        (None, Some(value)) => ("rope_scaling", value.clone()),
        (None, None) => ("rope_parameters", json!({})),
    };
    let within = |error: TrainError| TrainError::new(format!("{name}: {error}"));
    let object = parameters.as_object().ok_or_else(|| within(TrainError::new("expected an object")))?;
    let inner = Fields(object);
    let outer_theta = fields.number("rope_theta", 10_000.0)?;
    let theta = inner.number("rope_theta", outer_theta).map_err(within)?;
    inner.only("partial_rotary_factor", &[json!(1), json!(1.0)]).map_err(within)?;
    let factor = || {
        inner.number("factor", f64::NAN).map_err(within).and_then(|factor| {
            if factor.is_nan() { Err(within(TrainError::new("factor is missing"))) } else { Ok(factor) }
        })
    };
    let kind = match inner.text("rope_type").map_err(within)? {
        Some(kind) => Some(kind),
        None => inner.text("type").map_err(within)?,
    };
    let scaling = match kind {
        None | Some("default") => Scaling::None,
        Some("linear") => Scaling::Linear { factor: factor()? },
        Some("llama3") => Scaling::Llama3 {
            factor: factor()?,
            low: inner.number("low_freq_factor", 1.0).map_err(within)?,
            high: inner.number("high_freq_factor", 4.0).map_err(within)?,
            original: inner.number("original_max_position_embeddings", max_positions as f64).map_err(within)?,
        },
        Some(other) => {
            let message = format!("rope_type: \"{other}\" is not supported, only default, linear and llama3");
            return Err(within(TrainError::new(message)));
        }
    };
    Ok((theta, scaling))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qwen() -> Value {
        json!({
            "model_type": "qwen2", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rope_theta": 1000000.0,
            "tie_word_embeddings": true, "use_sliding_window": false, "sliding_window": 32, "torch_dtype": "bfloat16",
        })
    }

    fn with(name: &str, value: Value) -> Result<Config, TrainError> {
        let mut json = qwen();
        json[name] = value;
        Config::from_json(&json)
    }

    #[test]
    fn reads_what_older_and_newer_transformers_write() {
        let config = Config::from_json(&qwen()).unwrap();
        assert_eq!((config.head_width, config.rope_theta, config.tied), (4, 1e6, true));
        assert!(config.query_key_value_bias && !config.output_bias && !config.query_key_norm);
        let newer = with("rope_parameters", json!({"rope_type": "default", "rope_theta": 5000.0})).unwrap();
        assert_eq!(newer.rope_theta, 5000.0);
        let scaled = with("rope_scaling", json!({"type": "linear", "factor": 2.0})).unwrap();
        assert_eq!((scaled.rope_theta, scaled.rope_scaling), (1e6, Scaling::Linear { factor: 2.0 }));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let message = |name: &str, value: Value| with(name, value).unwrap_err().message;
        insta::assert_snapshot!(
            [
                message("model_type", json!("gemma")),
                message("hidden_act", json!("gelu")),
                message("use_sliding_window", json!(true)),
                message("layer_types", json!(["full_attention", "sliding_attention"])),
                message("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
                message("rope_scaling", json!({"rope_type": "linear"})),
                message("quantization_config", json!({"bits": 4})),
                message("num_key_value_heads", json!(3)),
                message("hidden_size", json!("8")),
                message("rms_norm_eps", json!(-1)),
                message("head_dim", json!(3)),
            ]
            .join("\n")
        );
    }

    #[test]
    fn what_is_written_is_what_was_read() {
        let mut json = qwen();
        json["architectures"] = json!(["Qwen2ForCausalLM"]);
        let config = Config::from_json(&json).unwrap();
        assert_eq!(config.to_json(Head::Language, Kind::BFloat16), json);
        let value = config.to_json(Head::Value, Kind::Float);
        assert_eq!(value["architectures"], json!(["Qwen2ForTokenClassification"]));
        assert_eq!((&value["torch_dtype"], &value["id2label"]), (&json!("float32"), &json!({"0": "LABEL_0"})));
    }
}
