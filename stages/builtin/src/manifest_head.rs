//! The few fields of a manifest that the lock is about.

use std::collections::BTreeMap;

use crate::device::PerDevice;

/// What a `stage.yaml` says of its program.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ManifestHead {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) sources: Vec<String>,
    /// Sources that change results on one kind of device alone.
    pub(crate) device_sources: PerDevice<Vec<String>>,
    /// Versions that hold on one kind of device in the place of `version`.
    pub(crate) device_versions: PerDevice<Option<String>>,
    pub(crate) rust: bool,
}

/// Fields with a field for each kind of device.
const BY_DEVICE: [&str; 2] = ["device_sources", "device_versions"];

impl ManifestHead {
    /// Reads them line by line. This is no YAML parser (the engine has one): it takes plain scalars and plain lists
    /// at the top level and below [`BY_DEVICE`], and refuses anything else there, so that it can't misread what it accepts.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut fields = fields(text)?;
        let one = |fields: &Fields, name: &str| match fields.get(name).map(Vec::as_slice) {
            Some([value]) => Ok(Some(value.clone())),
            None => Ok(None),
            Some(_) => Err(format!("`{name}:` must be a plain value on its own line")),
        };
        let required = |fields: &Fields, name: &str| {
            one(fields, name)?.ok_or_else(|| format!("`{name}:` must be a plain value on its own line"))
        };
        let run = fields.get("run").and_then(|words| words.first().cloned());
        let mut many = |name: &str| fields.remove(name).unwrap_or_default();
        let (sources, cpu, gpu) = (many("sources"), many("device_sources.cpu"), many("device_sources.gpu"));
        Ok(Self {
            name: required(&fields, "name")?,
            version: required(&fields, "version")?,
            rust: run.ok_or("`run:` must be a plain list")? == "cuda-agent",
            sources,
            device_sources: PerDevice { cpu, gpu },
            device_versions: PerDevice {
                cpu: one(&fields, "device_versions.cpu")?,
                gpu: one(&fields, "device_versions.gpu")?,
            },
        })
    }
}

/// A manifest without the block `device_versions:`.
pub(crate) fn without_device_versions(text: &str) -> String {
    let mut inside = false;
    let kept = text.split_inclusive('\n').filter(|line| {
        let is_top = !line.starts_with([' ', '#', '\n']);
        inside = if is_top { line.starts_with("device_versions:") } else { inside };
        !inside
    });
    kept.collect()
}

type Fields = BTreeMap<String, Vec<String>>;

fn fields(text: &str) -> Result<Fields, String> {
    let mut fields = Fields::new();
    let mut open = None;
    let mut of_device = None;
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#')) {
        let is_top = !line.starts_with([' ', '-']);
        let name = match (line.trim_start().split_once(':'), of_device) {
            (Some((name, rest)), _) if is_top => Some((name.to_owned(), rest)),
            (Some((name, rest)), Some(parent)) if !line.trim_start().starts_with('-') => {
                Some((format!("{parent}.{name}"), rest))
            }
            _ => None,
        };
        if is_top {
            of_device = BY_DEVICE.into_iter().find(|parent| name.as_ref().is_some_and(|(name, _)| name == parent));
        }
        match name {
            Some((name, rest)) if BY_DEVICE.contains(&name.as_str()) => {
                if !rest.trim().is_empty() {
                    return Err(format!("`{name}:` has `cpu:` and `gpu:` on lines of their own"));
                }
                open = None;
            }
            Some((name, rest)) if is_wanted(&name) => {
                fields.insert(name.clone(), inline_items(rest)?);
                open = rest.trim().is_empty().then_some(name);
            }
            Some((name, _)) if of_device.is_some() => return Err(format!("`{name}:` is for `cpu` or `gpu`")),
            _ => match (&open, line.trim_start().strip_prefix("- ")) {
                (Some(name), Some(item)) => fields.entry(name.clone()).or_default().push(plain(item)?),
                _ => open = None,
            },
        }
    }
    Ok(fields)
}

fn is_wanted(name: &str) -> bool {
    let of_device = |parent: &str| name.strip_prefix(parent).is_some_and(|device| [".cpu", ".gpu"].contains(&device));
    ["name", "version", "sources", "run"].contains(&name) || BY_DEVICE.into_iter().any(of_device)
}

fn inline_items(rest: &str) -> Result<Vec<String>, String> {
    let rest = rest.trim();
    match rest.strip_prefix('[').map(|list| list.strip_suffix(']')) {
        None if rest.is_empty() => Ok(Vec::new()),
        None => Ok(vec![plain(rest)?]),
        Some(None) => Err(format!("`{rest}`: a list in brackets must end on its line")),
        Some(Some(list)) => list.split(',').map(plain).collect(),
    }
}

fn plain(text: &str) -> Result<String, String> {
    let text = text.trim();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    if text.is_empty() || !text.chars().all(is_plain) {
        return Err(format!("`{text}`: only letters, digits and ._-/ are read here, without quotes or comments"));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_read_in_either_list_style() {
        let block = "name: ops/x\nversion: 1.2.0\nsummary: run\nrun: [python, x.py]\nsources:\n  # why\n  - x.py\n  - ../python\n";
        let flow = "name: ops/x\nversion: 1.2.0\nrun:\n- python\n- x.py\nsources: [x.py, ../python]\n";
        let head = ManifestHead::read(block).unwrap();
        assert_eq!(head.sources, ["x.py", "../python"]);
        assert_eq!(head, ManifestHead::read(flow).unwrap());
        assert!(!head.rust);
    }

    #[test]
    fn what_is_a_devices_alone_is_read() {
        let text = "name: ops/x\nversion: 1.2.0\nrun: [cuda-agent]\nsources: [../src]\ndevice_versions:\n  cpu: 1.2.1\n\
                    device_sources:\n  # why\n  cpu: [../cpu]\n  gpu:\n    - ../gpu\n    - ../clock\nsummary: x\n";
        let head = ManifestHead::read(text).unwrap();
        assert_eq!(head.sources, ["../src"]);
        assert_eq!(head.device_versions, PerDevice { cpu: Some("1.2.1".to_owned()), gpu: None });
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(head.device_sources, PerDevice { cpu: words(&["../cpu"]), gpu: words(&["../gpu", "../clock"]) });
    }

    #[test]
    fn versions_of_devices_can_be_left_out() {
        let without = "name: x\nversion: 1\nrun: [a]\nsources:\n  - x\n";
        assert_eq!(without_device_versions(without), without);
        let (first, rest) = without.split_at("name: x\n".len());
        let with = format!("{first}device_versions:\n  cpu: 2\n  # why\n  gpu: 3\n{rest}");
        assert_eq!(without_device_versions(&with), without);
    }

    #[test]
    fn what_could_be_misread_is_refused() {
        let lists = ["sources: [\"x.py\"]", "sources: [x.py", "sources: &a", "sources:\n  - {a: b}"];
        let devices = ["device_sources: {cpu: [a]}", "device_sources:\n  tpu: [a]", "device_versions:\n  cpu: [1, 2]"];
        for text in lists.into_iter().chain(devices) {
            let text = format!("name: ops/x\nversion: 1.2.0\nrun: [python, x.py]\n{text}\n");
            assert!(ManifestHead::read(&text).is_err(), "{text}");
        }
        assert!(ManifestHead::read("name: ops/x\nrun: [python]\n").is_err(), "no version");
    }
}
