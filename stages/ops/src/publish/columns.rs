//! What the columns of a measurements table mean, as the manifests of the stages that make them say it.
//!
//! The manifests are read line by line for `- { name: …, doc: … }` and for the same over several lines; a test holds
//! the result against every column that they list.

use std::collections::BTreeMap;

/// The manifests whose columns end up in a measurements table; of a name in several, the latest one counts.
const MANIFESTS: [&str; 5] = [
    include_str!("../../../kernels/profile/stage.yaml"),
    include_str!("../../generate/stage.yaml"),
    include_str!("../../resize/stage.yaml"),
    include_str!("../../synthesize/stage.yaml"),
    include_str!("../../measure/stage.yaml"),
];

/// Column to explanation. Within a manifest the first of a name counts: the rows' output comes before that of what was
/// left out.
pub fn explanations() -> BTreeMap<String, String> {
    MANIFESTS.iter().flat_map(|manifest| columns(manifest).into_iter().rev()).collect()
}

/// The columns of a manifest with their explanations, in its order.
fn columns(manifest: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = None;
    let mut lines = manifest.lines().peekable();
    while let Some(line) = lines.next() {
        let text = line.trim();
        if let Some(item) = text.strip_prefix("- {").and_then(|item| item.strip_suffix('}')) {
            open = None;
            if let (Some(name), Some((_, doc))) = (name_of(item), item.split_once(" doc: ")) {
                found.push((name, plain(doc)));
            }
        } else if let Some(item) = text.strip_prefix("- ") {
            open = name_of(item);
        } else if let Some(doc) = text.strip_prefix("doc: ") {
            let below = |next: &&str| indentation(next) > indentation(line);
            let more: Vec<&str> = std::iter::from_fn(|| lines.next_if(below)).map(str::trim).collect();
            let doc = if doc.starts_with('>') { more.join(" ") } else { plain(doc) };
            found.extend(open.take().map(|name| (name, doc)));
        }
    }
    found
}

/// The name in `name: X` or `name: X, …`.
fn name_of(item: &str) -> Option<String> {
    let rest = item.trim().strip_prefix("name: ")?;
    Some(rest.split(',').next().unwrap_or(rest).trim().to_owned())
}

/// A scalar without its quotes. JSON's quoting is YAML's.
fn plain(scalar: &str) -> String {
    let scalar = scalar.trim();
    serde_json::from_str(scalar).unwrap_or_else(|_| scalar.to_owned())
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_of_the_manifests_is_explained() {
        for manifest in MANIFESTS {
            let lines = manifest.lines().map(|line| line.trim().trim_start_matches(['-', '{', ' ']));
            let names: Vec<&str> = lines.filter_map(|line| line.strip_prefix("name: ")).skip(1).collect();
            let columns = columns(manifest);
            assert_eq!(columns.len(), names.len(), "{columns:?}");
            for (name, doc) in columns {
                assert!(doc.ends_with('.') && !doc.starts_with('"'), "{name}: {doc}");
            }
        }
    }

    #[test]
    fn each_way_to_write_an_explanation_is_read() {
        let explanations = explanations();
        assert_eq!(explanations["loads"], "The file runs and defines Model and get_inputs.");
        assert_eq!(explanations["output_constant"], "Each output holds one value only.");
        assert!(explanations["error_stage"].starts_with("Where the first failure was: start, load,"));
        assert!(explanations["error_stage"].ends_with("null without one."));
        assert!(explanations["sensitivity_abs"].starts_with("By tensor input: how far"));
        assert_eq!(explanations["profile_eager_ms"], "Time of an eager forward in milliseconds.");
        assert!(explanations["eager_ms"].starts_with("Median time"));
        assert!(explanations["data_source"].starts_with("torch#1"));
        assert!(explanations["roofline_ms"].starts_with("The least time"));
    }
}
