//! `matrix:`: one stage becomes one cell for each combination of values.

use std::collections::BTreeMap;

use serde_json::Value;

use super::substitute::{Scope, scalar_text};
use crate::spec::document::Spot;
use crate::spec::error::Problem;
use crate::spec::raw::Entries;
use crate::spec::units::is_name;

/// More cells than this are taken for a mistake.
const MOST_CELLS: usize = 100_000;

/// The axes of a stage, and its cells in the order in which they run through the values, the last axis fastest.
#[derive(Default)]
pub(super) struct Matrix {
    pub axes: Vec<String>,
    pub cells: Vec<BTreeMap<String, Value>>,
}

impl Matrix {
    /// `lr=0.1,size=small`: no two cells have the same, whatever their values hold.
    pub fn label(&self, cell: &BTreeMap<String, Value>) -> String {
        let part = |axis: &String| format!("{axis}={}", value_in_name(&cell[axis]));
        self.axes.iter().map(part).collect::<Vec<String>>().join(",")
    }
}

/// A value in a cell's name. What divides names, or would not show, is written as in a URL: `1,y=2` as `1%2Cy%3D2`.
pub(super) fn value_in_name(value: &Value) -> String {
    let mut name = String::new();
    for char in scalar_text(value).unwrap_or_default().chars() {
        if char.is_control() || ",=[]%".contains(char) {
            let mut bytes = [0; 4];
            char.encode_utf8(&mut bytes).bytes().for_each(|byte| name.push_str(&format!("%{byte:02X}")));
        } else {
            name.push(char);
        }
    }
    name
}

/// Reads the axes; `None` where one of them is wrong.
pub(super) fn expand(
    matrix: Entries<Value>,
    scope: &Scope,
    spot: &Spot,
    problems: &mut Vec<Problem>,
) -> Option<Matrix> {
    let before = problems.len();
    let mut axes: Vec<(String, Vec<Value>)> = Vec::new();
    if matrix.0.is_empty() {
        problems.push(Problem::new(spot.place().name(), "`matrix` needs at least one axis"));
    }
    for (axis, values) in matrix.0 {
        let spot = spot.key(&axis);
        if !is_name(&axis) {
            problems.push(
                Problem::new(spot.place().name(), format!("`{axis}` can't be the name of an axis"))
                    .hint(super::NAME_HINT),
            );
        }
        let values =
            scope.value(values, &spot, problems).and_then(|values| axis_values(&axis, values, &spot, problems));
        if let Some(values) = values {
            axes.push((axis, values));
        }
    }
    let count = axes.iter().map(|(_, values)| values.len()).try_fold(1, usize::checked_mul);
    if count.is_none_or(|count| count > MOST_CELLS) {
        problems.push(Problem::new(spot.place().name(), format!("`matrix` makes more than {MOST_CELLS} stages")));
    }
    (problems.len() == before).then(|| product(axes))
}

fn axis_values(axis: &str, values: Value, spot: &Spot, problems: &mut Vec<Problem>) -> Option<Vec<Value>> {
    let Value::Array(values) = values else {
        let what = cuda_agent_protocol::manifest::describe(&values);
        let problem = Problem::new(spot.place(), format!("axis `{axis}` must be a list of values, not {what}"));
        problems.push(
            problem.hint(format!("write `{axis}: [{}]`", scalar_text(&values).unwrap_or_else(|| "…".to_owned()))),
        );
        return None;
    };
    if values.is_empty() {
        problems.push(Problem::new(spot.place(), format!("axis `{axis}` has no values")));
        return None;
    }
    let mut seen = std::collections::HashSet::new();
    for (index, value) in values.iter().enumerate() {
        let place = || spot.index(index).place();
        match scalar_text(value) {
            None => problems
                .push(Problem::new(place(), format!("values of axis `{axis}` must be text, numbers or booleans"))),
            Some(text) if !seen.insert(text.clone()) => {
                problems.push(Problem::new(place(), format!("axis `{axis}` has the value {text} twice")));
            }
            Some(_) => {}
        }
    }
    Some(values)
}

fn product(axes: Vec<(String, Vec<Value>)>) -> Matrix {
    let mut cells = vec![BTreeMap::new()];
    for (axis, values) in &axes {
        let with = |cell: &BTreeMap<String, Value>, value: &Value| {
            let mut cell = cell.clone();
            cell.insert(axis.clone(), value.clone());
            cell
        };
        cells = cells.iter().flat_map(|cell| values.iter().map(move |value| with(cell, value))).collect();
    }
    Matrix { axes: axes.into_iter().map(|(axis, _)| axis).collect(), cells }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn label(values: &[(&str, Value)]) -> String {
        let axes = values.iter().map(|(axis, _)| (*axis).to_owned()).collect();
        let cell = values.iter().map(|(axis, value)| ((*axis).to_owned(), value.clone())).collect();
        Matrix { axes, cells: Vec::new() }.label(&cell)
    }

    #[test]
    fn a_value_cannot_pass_for_another_axis() {
        assert_eq!(label(&[("lr", json!(0.1)), ("s", json!("a b/é"))]), "lr=0.1,s=a b/é");
        assert_eq!(label(&[("x", json!("1,y=2")), ("y", json!(3))]), "x=1%2Cy%3D2,y=3");
        assert_eq!(label(&[("x", json!(1)), ("y", json!("2,y=3"))]), "x=1,y=2%2Cy%3D3");
        assert_eq!(label(&[("x", json!("a].b[\n%"))]), "x=a%5D.b%5B%0A%25");
    }

    proptest! {
        #[test]
        fn two_cells_never_have_one_label(
            a in ("[xy=,%0-9]{0,6}", "[xy=,%0-9]{0,6}"), b in ("[xy=,%0-9]{0,6}", "[xy=,%0-9]{0,6}"),
        ) {
            let of = |(x, y): &(String, String)| label(&[("x", json!(x)), ("y", json!(y))]);
            prop_assert_eq!(of(&a) == of(&b), a == b);
        }
    }
}
