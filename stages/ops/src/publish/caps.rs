//! Caps on how often an operator, or two operators together, may be published: what keeps a set diverse.
//!
//! A cap is a share of the rows that are published. [`Budget`] holds the counts and takes a row if every cap allows it.
//! A module and the functions of its name count as one operator: `nn.GroupNorm`, `F.group_norm` and `torch.group_norm`
//! are `groupnorm`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// No cap is below this many rows, so that a set of a few dozen can be published at all.
pub const LEAST_ROWS: usize = 5;

/// A cap's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cap {
    /// One operator.
    Operator,
    /// One operator that models use everywhere: a linear layer or a convolution.
    Wide,
    /// Bilinear layers together, which are heavy for their size and so would crowd others out.
    Bilinear,
    /// Two different operators in one row, in whatever order.
    Pair,
}

impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Operator => "one operator",
            Self::Wide => "one linear layer or convolution",
            Self::Bilinear => "bilinear layers together",
            Self::Pair => "one pair of operators",
        })
    }
}

/// The largest share of the published rows by cap; 0 is no cap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Caps {
    /// Of [`Cap::Operator`].
    pub operator: f64,
    /// Of [`Cap::Wide`].
    pub wide: f64,
    /// Of [`Cap::Bilinear`].
    pub bilinear: f64,
    /// Of [`Cap::Pair`].
    pub pair: f64,
}

impl Caps {
    /// Every kind with its share.
    pub fn shares(&self) -> [(Cap, f64); 4] {
        [(Cap::Operator, self.operator), (Cap::Wide, self.wide), (Cap::Bilinear, self.bilinear), (Cap::Pair, self.pair)]
    }

    /// The most rows that a cap allows among `published`; `None` where it is off.
    pub fn limit(&self, cap: Cap, published: usize) -> Option<usize> {
        let (_, share) = self.shares().into_iter().find(|(other, _)| *other == cap)?;
        // 0.03 of 100 is 3, though the product of the two floating-point numbers may be a little less.
        let rows = (share * published as f64 + 1e-6).floor() as usize;
        (share > 0.0).then_some(rows.max(LEAST_ROWS))
    }
}

/// Whether the operator is one that the wider cap is for.
pub fn is_wide(operator: &str) -> bool {
    ["nn.Linear", "F.linear"].contains(&operator) || operator.starts_with("nn.Conv") || operator.starts_with("F.conv")
}

/// What an operator of torch and its namesakes count as; a class of transformers is its own.
fn namesake(operator: &str) -> String {
    match operator.rsplit_once('.') {
        Some((namespace, name)) if !namespace.starts_with("transformers") => name.to_lowercase().replace('_', ""),
        _ => operator.to_owned(),
    }
}

fn is_bilinear(operator: &str) -> bool {
    ["nn.Bilinear", "F.bilinear"].contains(&operator)
}

/// What a row counts towards: the caps, each with what it is a cap on.
pub type Groups = Vec<(Cap, String)>;

/// The groups of a row with these operators.
pub fn groups(operators: &[String]) -> Groups {
    let cap = |operator: &str| if is_wide(operator) { Cap::Wide } else { Cap::Operator };
    let named: BTreeSet<(String, Cap)> = operators.iter().map(|name| (namesake(name), cap(name))).collect();
    let mut groups: Groups = named.iter().map(|(name, cap)| (*cap, name.clone())).collect();
    if operators.iter().any(|operator| is_bilinear(operator)) {
        groups.push((Cap::Bilinear, "nn.Bilinear, F.bilinear".to_owned()));
    }
    let distinct: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
    for (index, first) in distinct.iter().enumerate() {
        groups.extend(distinct[index + 1..].iter().map(|second| (Cap::Pair, format!("{first} + {second}"))));
    }
    groups
}

/// How many of the rows are in each group.
pub fn tally<'a>(rows: impl IntoIterator<Item = &'a Groups>) -> BTreeMap<&'a (Cap, String), usize> {
    let mut tally = BTreeMap::new();
    for group in rows.into_iter().flatten() {
        *tally.entry(group).or_default() += 1;
    }
    tally
}

/// Counts rows as they are taken.
pub struct Budget<'a> {
    limits: BTreeMap<Cap, usize>,
    taken: BTreeMap<&'a (Cap, String), usize>,
    passed_over: BTreeMap<Cap, usize>,
}

impl<'a> Budget<'a> {
    /// For this many rows.
    pub fn new(caps: &Caps, published: usize) -> Self {
        let limits = caps.shares().into_iter().filter_map(|(cap, _)| Some((cap, caps.limit(cap, published)?)));
        Self { limits: limits.collect(), taken: BTreeMap::new(), passed_over: BTreeMap::new() }
    }

    /// Counts the row, or says that it is over a cap; such a row is counted at the first cap that it is over.
    pub fn take(&mut self, groups: &'a Groups) -> bool {
        let taken = |group: &(Cap, String)| self.taken.get(group).copied().unwrap_or(0);
        let is_full = |group: &&(Cap, String)| self.limits.get(&group.0).is_some_and(|limit| taken(group) >= *limit);
        if let Some((cap, _)) = groups.iter().find(is_full) {
            *self.passed_over.entry(*cap).or_default() += 1;
            return false;
        }
        for group in groups {
            *self.taken.entry(group).or_default() += 1;
        }
        true
    }

    /// How many rows were not taken, by cap.
    pub fn passed_over(self) -> BTreeMap<Cap, usize> {
        self.passed_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(operators: &[&str]) -> Groups {
        groups(&operators.iter().map(|operator| operator.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn a_row_counts_once_for_each_operator_and_pair() {
        assert_eq!(
            row(&["nn.ReLU", "nn.Conv2d", "nn.ReLU", "F.bilinear"]),
            [
                (Cap::Operator, "bilinear".to_owned()),
                (Cap::Wide, "conv2d".to_owned()),
                (Cap::Operator, "relu".to_owned()),
                (Cap::Bilinear, "nn.Bilinear, F.bilinear".to_owned()),
                (Cap::Pair, "bilinear + conv2d".to_owned()),
                (Cap::Pair, "bilinear + relu".to_owned()),
                (Cap::Pair, "conv2d + relu".to_owned()),
            ]
        );
        assert_eq!(row(&["nn.GroupNorm", "torch.group_norm"]), [(Cap::Operator, "groupnorm".to_owned())]);
        assert_eq!(row(&["transformers.models.x.A"]), [(Cap::Operator, "transformers.models.x.A".to_owned())]);
        assert_eq!(row(&["a", "b"]), row(&["b", "a"]));
    }

    #[test]
    fn linear_layers_and_convolutions_are_wide_and_no_other() {
        for operator in ["nn.Linear", "F.linear", "nn.ConvTranspose3d", "F.conv1d", "F.conv_transpose2d"] {
            assert!(is_wide(operator), "{operator}");
        }
        for operator in ["nn.Bilinear", "F.bilinear", "nn.ConstantPad2d", "torch.matmul", "nn.Identity"] {
            assert!(!is_wide(operator), "{operator}");
        }
    }

    #[test]
    fn a_limit_is_a_share_of_what_is_published_but_never_tiny() {
        let caps = Caps { operator: 0.03, wide: 0.06, bilinear: 0.01, pair: 0.0 };
        assert_eq!(caps.limit(Cap::Operator, 6000), Some(180));
        assert_eq!(caps.limit(Cap::Wide, 1100), Some(66));
        assert_eq!(caps.limit(Cap::Bilinear, 999), Some(9));
        assert_eq!(caps.limit(Cap::Bilinear, 50), Some(LEAST_ROWS));
        assert_eq!(caps.limit(Cap::Pair, 6000), None);
    }

    #[test]
    fn a_row_over_a_cap_counts_for_nothing_else() {
        let caps = Caps { operator: 0.03, wide: 0.0, bilinear: 0.0, pair: 0.0 };
        let rows: Vec<Groups> =
            (0..LEAST_ROWS + 2).map(|_| row(&["a"])).chain([row(&["a", "b"]), row(&["b"])]).collect();
        let mut budget = Budget::new(&caps, 10);
        let taken: Vec<bool> = rows.iter().map(|groups| budget.take(groups)).collect();
        assert_eq!(taken.iter().filter(|taken| **taken).count(), LEAST_ROWS + 1);
        assert_eq!(taken.last(), Some(&true));
        assert_eq!(budget.passed_over(), BTreeMap::from([(Cap::Operator, 3)]));
    }
}
