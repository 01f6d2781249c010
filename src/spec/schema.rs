//! JSON Schema (draft 2020-12) of pipeline files, for editors.
//!
//! It comes from the same tables as the errors, with the parameters, inputs and docs of each stage kind added. Where a
//! value may be `${…}`, text is allowed too.

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::{Param, ParamType};
use serde_json::{Map, Value, json};

use super::Catalog;
use super::shape::{PIPELINE, Presence, Record, STAGE, Shape};

/// The schema of pipeline files that use the kinds of a catalog.
pub fn schema(catalog: &dyn Catalog) -> Value {
    let mut names = catalog.names();
    names.sort();
    let kinds: Vec<_> = names.iter().filter_map(|name| catalog.get(name)).collect();
    let mut stage = record(&STAGE);
    stage["properties"]["uses"] = uses(&kinds);
    let conditions: Vec<Value> = kinds.iter().map(|kind| kind_condition(kind)).chain([run_condition()]).collect();
    stage["allOf"] = Value::Array(conditions);
    let mut pipeline = record(&PIPELINE);
    pipeline["properties"]["stages"]["additionalProperties"] = json!({"$ref": "#/$defs/stage"});
    pipeline["properties"]["stages"]["propertyNames"] = json!({"pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"});
    // Stages may come from included files.
    pipeline["required"] = json!(["name"]);
    pipeline["anyOf"] = json!([{"required": ["stages"]}, {"required": ["include"]}]);
    let mut whole = Map::new();
    whole.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
    whole.insert("title".to_owned(), json!("cuda-agent pipeline"));
    if let Value::Object(fields) = pipeline {
        whole.extend(fields);
    }
    whole.insert("$defs".to_owned(), json!({"stage": stage}));
    Value::Object(whole)
}

fn uses(kinds: &[std::sync::Arc<Manifest>]) -> Value {
    let option = |kind: &std::sync::Arc<Manifest>| json!({"const": kind.name, "description": kind.summary});
    let run = json!({"const": "run", "description": "A command of your own, with declared inputs and outputs."});
    let options: Vec<Value> = kinds.iter().map(option).chain([run]).collect();
    json!({"description": "The stage kind, or `run` for a command of your own.", "oneOf": options})
}

fn kind_condition(kind: &Manifest) -> Value {
    let params: Map<String, Value> = kind.params.iter().map(|(name, param)| (name.clone(), parameter(param))).collect();
    let input = |(name, port): (&String, &cuda_agent_protocol::manifest::InputPort)| {
        let several = if port.list { ", several" } else { "" };
        (name.clone(), json!({"description": sentence(&format!("`{}`{several}", port.port_type), &port.doc)}))
    };
    let inputs: Map<String, Value> = kind.inputs.iter().map(input).collect();
    let needed_inputs: Vec<&String> =
        kind.inputs.iter().filter(|(_, port)| !port.optional).map(|(name, _)| name).collect();
    let needed_params: Vec<&String> =
        kind.params.iter().filter(|(_, param)| param.default.is_none()).map(|(name, _)| name).collect();
    let mut required = Vec::new();
    for (field, needed) in [("inputs", &needed_inputs), ("with", &needed_params)] {
        if !needed.is_empty() {
            required.push(field);
        }
    }
    json!({
        "if": {"properties": {"uses": {"const": kind.name}}, "required": ["uses"]},
        "then": {
            "description": kind.summary,
            "required": required,
            "properties": {
                "with": {"type": "object", "properties": params, "required": needed_params, "additionalProperties": false},
                "inputs": {"properties": inputs, "required": needed_inputs, "propertyNames": {"enum": kind.inputs.keys().collect::<Vec<_>>()}},
                "run": false, "outputs": false, "files": false,
            },
        },
    })
}

fn run_condition() -> Value {
    json!({
        "if": {"properties": {"uses": {"const": "run"}}, "required": ["uses"]},
        "then": {"required": ["run"], "properties": {"with": false, "allow_failed_rows": false, "max_rejected": false}},
    })
}

fn parameter(param: &Param) -> Value {
    let mut schema = Map::new();
    let type_name = match param.param_type {
        ParamType::List => "array",
        ParamType::Map => "object",
        other => other.name(),
    };
    schema.insert("type".to_owned(), json!(type_name));
    for (name, bound) in [("minimum", param.min), ("maximum", param.max)] {
        if let Some(bound) = bound {
            schema.insert(name.to_owned(), json!(bound));
        }
    }
    match param.param_type {
        _ if param.choices.is_empty() => {}
        ParamType::List => drop(schema.insert("items".to_owned(), json!({"enum": param.choices}))),
        _ => drop(schema.insert("enum".to_owned(), json!(param.choices))),
    }
    let mut whole = Map::new();
    whole.insert("description".to_owned(), json!(param.doc));
    if let Some(default) = &param.default {
        whole.insert("default".to_owned(), default.clone());
    }
    whole.insert("anyOf".to_owned(), json!([schema, expression()]));
    Value::Object(whole)
}

/// Text with `${…}` in it, which may stand for a value of any type.
fn expression() -> Value {
    json!({"type": "string", "pattern": "\\$\\{[^}]*\\}"})
}

fn sentence(first: &str, rest: &str) -> String {
    if rest.is_empty() { first.to_owned() } else { format!("{first}. {rest}") }
}

fn record(record: &Record) -> Value {
    let mut properties = Map::new();
    for field in record.fields {
        let mut schema = shape(&field.shape);
        if let Value::Object(map) = &mut schema {
            map.insert("description".to_owned(), json!(field.doc));
        }
        properties.insert(field.name.to_owned(), schema);
    }
    let required = record.fields.iter().filter(|field| field.presence == Presence::Required);
    let required: Vec<&str> = required.map(|field| field.name).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn shape(shape_: &Shape) -> Value {
    match shape_ {
        Shape::Text | Shape::Column | Shape::Size => json!({"type": "string"}),
        Shape::Written => json!({"type": ["string", "number", "boolean"]}),
        Shape::Any("a whole number") => json!({"anyOf": [{"type": "integer", "minimum": 0}, expression()]}),
        Shape::Any("a whole number, or `all`") => {
            json!({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "all"}, expression()]})
        }
        Shape::Any("a value") => json!({}),
        Shape::Any(_) => json!({"type": ["string", "number", "boolean"]}),
        Shape::Boolean => json!({"type": "boolean"}),
        Shape::Whole => json!({"type": "integer", "minimum": 0}),
        Shape::Number => json!({"type": "number"}),
        Shape::Choice(choices) => json!({"enum": choices}),
        Shape::List(item) => json!({"type": "array", "items": shape(item)}),
        Shape::Map(item) => json!({"type": "object", "additionalProperties": shape(item)}),
        Shape::Record(inner) => record(inner),
        Shape::Either(shapes) => json!({"anyOf": shapes.iter().map(shape).collect::<Vec<Value>>()}),
    }
}
