//! What each process of a group computes of a batch.
//!
//! A process gets trajectories that are neighbours, so that those that begin alike stay together, and no process gets much more
//! than another. Weights of tokens are those of the whole batch, whoever computes them.

use std::ops::Range;

use super::forward::{ForwardSettings, Said, by_trajectory, evaluate, evaluate_values, fill, sizes};
use super::trajectory::Trajectory;
use crate::TrainError;
use crate::group::Group;
use crate::model::Decoder;

/// Divides `trajectories` into `count` ranges, in order, of which the largest is as small as can be in tokens, those that
/// neighbours begin with alike counted once. Ranges at the end may be empty.
pub fn divide(trajectories: &[&Trajectory], count: usize) -> Vec<Range<usize>> {
    let sizes = sizes(trajectories);
    let filled = |most: usize| fill(&sizes, |size| size.tokens <= most);
    // The least bound under which filling one range after another needs no more ranges than there are.
    let attended = || sizes.iter().map(|size| size.attended);
    let (mut low, mut high) = (attended().max().unwrap_or(0), attended().sum());
    while low < high {
        let middle = low + (high - low) / 2;
        match filled(middle).len() <= count {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    let mut ranges = filled(high);
    ranges.resize(count, sizes.len()..sizes.len());
    ranges
}

/// The part of `trajectories` that this process computes.
pub fn own(trajectories: &[&Trajectory], group: &Group) -> Range<usize> {
    match group.size() {
        1 => 0..trajectories.len(),
        size => divide(trajectories, size).swap_remove(group.rank()),
    }
}

/// [`evaluate`], divided among the processes of a group; all get all of it.
pub fn evaluate_among(
    group: &Group,
    decoder: &Decoder,
    trajectories: &[&Trajectory],
    settings: &ForwardSettings,
) -> Result<Said, TrainError> {
    let said = evaluate(decoder, &trajectories[own(trajectories, group)], settings);
    Ok(Said {
        values: put_together(group, trajectories, said.values)?,
        entropies: put_together(group, trajectories, said.entropies)?,
    })
}

/// [`evaluate_values`], likewise.
pub fn evaluate_values_among(
    group: &Group,
    critic: &Decoder,
    trajectories: &[&Trajectory],
    settings: &ForwardSettings,
) -> Result<Vec<Vec<f64>>, TrainError> {
    let own = evaluate_values(critic, &trajectories[own(trajectories, group)], settings);
    put_together(group, trajectories, own)
}

/// Numbers by trajectory and token, of each process those that it computed.
fn put_together(group: &Group, trajectories: &[&Trajectory], own: Vec<Vec<f64>>) -> Result<Vec<Vec<f64>>, TrainError> {
    match group.size() {
        1 => Ok(own),
        _ => Ok(by_trajectory(&group.gather_numbers(&own.concat())?.concat(), trajectories)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trajectory(ids: Vec<i64>) -> Trajectory {
        Trajectory { ids, ..Trajectory::default() }
    }

    fn divided(all: &[Trajectory], count: usize) -> Vec<Range<usize>> {
        divide(&all.iter().collect::<Vec<_>>(), count)
    }

    #[test]
    fn what_begins_alike_stays_together_where_that_costs_nothing() {
        // Four prompts of 100 tokens with four answers of 10 each: 140 tokens a prompt.
        let answers = |prompt: i64| (0..4).map(move |answer| [vec![prompt; 100], vec![10 + answer; 10]].concat());
        let all: Vec<Trajectory> = (0..4).flat_map(answers).map(trajectory).collect();
        assert_eq!(divided(&all, 2), [0..8, 8..16]);
        assert_eq!(divided(&all, 4), [0..4, 4..8, 8..12, 12..16]);
        assert_eq!(divided(&all, 1), vec![0..all.len()]);
        // A prompt is computed twice where that is better than waiting for whoever has two of them.
        let three = divided(&all, 3);
        assert!(three.iter().all(|range| range.len() >= 4), "{three:?}");
    }

    #[test]
    fn every_trajectory_is_computed_once_and_the_largest_part_is_small() {
        let lengths = |seed: u64| (0..40).map(move |index| 1 + crate::random::mix(seed * 40 + index) as usize % 50);
        for seed in 0..20 {
            let all: Vec<Trajectory> =
                lengths(seed).enumerate().map(|(index, length)| trajectory(vec![index as i64; length])).collect();
            for count in 1..=5 {
                let ranges = divided(&all, count);
                let covered: Vec<usize> = ranges.iter().cloned().flatten().collect();
                assert_eq!((ranges.len(), covered), (count, (0..40).collect()));
                let tokens = |range: &Range<usize>| all[range.clone()].iter().map(|one| one.ids.len()).sum::<usize>();
                let (total, largest) = (tokens(&(0..40)), ranges.iter().map(tokens).max().unwrap());
                assert!(largest <= total / count + 50, "{largest} of {total} in {count}");
            }
        }
    }

    #[test]
    fn there_may_be_fewer_trajectories_than_processes() {
        assert_eq!(divided(&[trajectory(vec![1, 2]), trajectory(vec![3])], 4), [0..1, 1..2, 2..2, 2..2]);
        assert_eq!(divided(&[], 2), [0..0, 0..0]);
    }
}
