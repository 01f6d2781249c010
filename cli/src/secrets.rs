//! Stages that lack a secret: `plan` warns of them, and `run` begins nothing that must fail for want of one.

use std::collections::BTreeMap;

use cuda_agent_engine::execute::secrets::{SecretError, Secrets};
use cuda_agent_engine::key::MissReason;
use cuda_agent_engine::plan::{Planner, StagePlan, Verdict};

use crate::CliError;

/// A stage that lacks a secret.
pub struct Lack<'a> {
    /// The stage.
    pub stage: &'a str,
    /// Why it has no value.
    pub error: &'a SecretError,
    /// Whether a run is certain to need it: the stage's inputs are known, or it has no earlier result that changed inputs
    /// could lead back to.
    pub is_certain: bool,
}

impl Lack<'_> {
    /// A warning in one line.
    pub fn in_words(&self) -> String {
        let what = if self.is_certain { "fails without it" } else { "fails without it if it has to run" };
        format!("{}; stage `{}` {what}", self.error, self.stage)
    }
}

/// Of planned stages, those that would start a program without one of their secrets.
pub async fn lacks<'a>(
    planner: &Planner<'a>,
    secrets: &'a Secrets,
    plans: &[Option<StagePlan>],
) -> Result<Vec<Lack<'a>>, CliError> {
    let mut found = Vec::new();
    for (stage, plan) in planner.pipeline.stages.iter().zip(plans) {
        let (Some(plan), Some(error)) = (plan, secrets.missing(stage)) else { continue };
        let is_by_row = stage.kind.by_row.is_some();
        let is_certain = match (&plan.verdict, &plan.resolved) {
            (Verdict::Hit { .. }, _) => continue,
            (Verdict::Miss { reasons, .. }, Some(resolved)) if !reasons.contains(&MissReason::Refresh) => {
                match planner.rows_to_do(stage, resolved).await? {
                    // Every row is recorded, so no program starts.
                    Some((0, _)) => continue,
                    _ => true,
                }
            }
            (Verdict::Miss { .. }, _) => true,
            // Rows may be recorded that no run of this pipeline has seen.
            (Verdict::Pending { .. }, _) => !is_by_row && !planner.has_result(stage).await?,
        };
        found.push(Lack { stage: &stage.name, error, is_certain });
    }
    Ok(found)
}

/// Refuses what is certain to fail, all of it in one error.
pub fn refuse(lacks: &[Lack<'_>]) -> Result<(), CliError> {
    let mut stages: BTreeMap<&str, (&SecretError, Vec<String>)> = BTreeMap::new();
    for lack in lacks.iter().filter(|lack| lack.is_certain) {
        let (_, names) = stages.entry(&lack.error.name).or_insert((lack.error, Vec::new()));
        names.push(format!("`{}`", lack.stage));
    }
    let errors = stages.into_values().map(|(error, names)| {
        let of = if names.len() == 1 { "stage" } else { "stages" };
        CliError::environment(format!("{error}; {of} {} cannot run without it", names.join(", ")))
            .with_hint(error.hint.clone())
    });
    CliError::joined(errors).map_or(Ok(()), Err)
}
