//! `cuda-agent gc`: what no run that is kept needs.

use std::time::Duration;

use clap::Args;
use cuda_agent_engine::execute::seconds;
use cuda_agent_engine::schedule;
use cuda_agent_engine::store::gc::{self, Class, Garbage, Policy, Swept};
use cuda_agent_engine::store::{GRACE, grace};
use serde_json::{Value, json};

use crate::project::Project;
use crate::{CliError, Exit, print, print_json};

/// Maximum number of runs listed.
const SHOWN: usize = 20;

/// Options of `gc`.
#[derive(Args)]
pub struct Options {
    /// Delete: the first time note what is garbage, and a day later, when it is run again, delete what still is
    #[arg(long)]
    delete: bool,
    /// Delete at once, for somebody who is sure that nobody else uses the store
    #[arg(long, requires = "delete")]
    now: bool,
    /// Number of newest runs to keep for each pipeline; the last successful one is kept in any case
    #[arg(long, value_name = "N", default_value_t = 10)]
    keep_last: usize,
    /// Keep all runs that are younger, too: `30d`, `12h`, `0d` for none
    #[arg(long, value_name = "AGE", default_value = "30d", value_parser = age)]
    older_than: Duration,
}

/// An age in days or hours.
fn age(text: &str) -> Result<Duration, String> {
    let wrong = || String::from("write a number of days or hours: `30d`, `12h`");
    let unit = match text.chars().last() {
        Some('d') => 86_400,
        Some('h') => 3600,
        _ => return Err(wrong()),
    };
    let number: u32 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    Ok(Duration::from_secs(u64::from(number) * unit))
}

/// Finds garbage, and deletes it where it is told to.
pub async fn gc(project: &Project, options: Options) -> Result<Exit, CliError> {
    let store = project.existing_store()?;
    if store.is_offline() {
        return Err(CliError::usage("offline nobody can tell what others use").with_hint("leave `--offline` out"));
    }
    if options.delete {
        project.refuse_read_only(&store)?;
    }
    let policy = Policy {
        keep_last: options.keep_last,
        older_than: Some(options.older_than),
        grace: grace(),
        now_alone: options.now,
    };
    let told = if options.delete {
        let swept = gc::sweep(store.truth(), &policy).await?;
        if let Swept::Deleted(garbage) = &swept {
            store.forget_runs(&garbage.runs).await?;
        }
        told_of(swept)?
    } else {
        let plan = gc::plan(store.truth(), &policy).await?;
        let next = match plan.garbage.is_empty() {
            true => nothing(&plan.garbage),
            false => young(&plan.garbage) + &next_step(plan.wait),
        };
        let wait = plan.wait.map(|wait| wait.as_secs_f64());
        let mut value = as_json(&plan.garbage, "found");
        value["wait_s"] = json!(wait);
        (table(&plan.garbage, "garbage") + &next, value)
    };
    match project.common.json {
        true => print_json(&told.1),
        false => print(&told.0),
    }
    Ok(Exit::Done)
}

fn told_of(swept: Swept) -> Result<(String, Value), CliError> {
    Ok(match swept {
        Swept::Nothing(garbage) => (table(&garbage, "garbage") + &nothing(&garbage), as_json(&garbage, "nothing")),
        Swept::Condemned(garbage) => {
            let wait = seconds(grace());
            let next = format!(
                "Noted. Run `cuda-agent gc --delete` again after {wait}, for example from cron: what is still garbage \
                 goes then.\n"
            );
            let mut value = as_json(&garbage, "condemned");
            value["wait_s"] = json!(grace().as_secs_f64());
            (table(&garbage, "garbage") + &young(&garbage) + &next, value)
        }
        Swept::Waiting(wait) => (
            format!(
                "What was garbage at the last `gc --delete` can be deleted in {}: run it again then.\n",
                seconds(wait)
            ),
            json!({ "outcome": "waiting", "wait_s": wait.as_secs_f64() }),
        ),
        Swept::Deleted(garbage) => {
            let total = garbage.total();
            let next = format!("Deleted {} objects, {}.\n", total.objects, schedule::bytes(total.bytes));
            (table(&garbage, "deleted") + &next, as_json(&garbage, "deleted"))
        }
        Swept::Refused(live) => {
            return Err(CliError::usage(format!("a run goes on: {}", live.join(", "))).with_hint(
                "wait for its end, or leave `--now` out; a run that was killed counts as going on for ten minutes",
            ));
        }
    })
}

/// What to do about garbage that was found.
fn next_step(wait: Option<Duration>) -> String {
    let day = day();
    match wait {
        None => format!(
            "Nothing was deleted. `cuda-agent gc --delete` notes this, and deletes what is still garbage when it is run \
             again after {day}.\n"
        ),
        Some(Duration::ZERO) => {
            String::from("Nothing was deleted. `cuda-agent gc --delete` deletes what it noted the last time.\n")
        }
        Some(wait) => format!(
            "Nothing was deleted. `cuda-agent gc --delete` deletes what it noted the last time in {}.\n",
            seconds(wait)
        ),
    }
}

fn nothing(garbage: &Garbage) -> String {
    let runs = garbage.staying.get(&Class::Runs).map_or(0, |sum| sum.objects);
    format!("Nothing is garbage. Runs that are kept: {runs}.\n{}", young(garbage))
}

/// What only its age keeps.
fn young(garbage: &Garbage) -> String {
    let gc::Sum { objects, bytes } = garbage.young;
    if objects == 0 {
        return String::new();
    }
    let size = schedule::bytes(bytes);
    format!(
        "Kept for now: {objects} objects ({size}) that no kept run needs, but that are younger than {}. \
         `--delete --now` does not wait; it is for somebody who is sure that nobody else uses the store.\n",
        day()
    )
}

/// The grace period in words.
fn day() -> String {
    if grace() == GRACE { String::from("a day") } else { seconds(grace()) }
}

fn table(garbage: &Garbage, going: &str) -> String {
    let mut text = format!("{:<8}  {going:>20}  {:>20}\n", "", "kept");
    for class in [Class::Runs, Class::Records, Class::Blobs, Class::Rows, Class::Logs, Class::Other] {
        let cell = |sums: &std::collections::BTreeMap<Class, gc::Sum>| {
            let sum = sums.get(&class).copied().unwrap_or_default();
            format!("{} ({})", sum.objects, schedule::bytes(sum.bytes))
        };
        text.push_str(&format!("{class:<8}  {:>20}  {:>20}\n", cell(&garbage.going), cell(&garbage.staying)));
    }
    for run in garbage.runs.iter().take(SHOWN) {
        text.push_str(&format!("run {run}: {going}\n"));
    }
    if garbage.runs.len() > SHOWN {
        text.push_str(&format!("and {} more runs\n", garbage.runs.len() - SHOWN));
    }
    for name in &garbage.unreadable {
        text.push_str(&format!("{name} is damaged, so what it named is not kept\n"));
    }
    text
}

fn as_json(garbage: &Garbage, outcome: &str) -> Value {
    let mut value = serde_json::to_value(garbage).expect("garbage is plain data");
    value["outcome"] = json!(outcome);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_days_or_hours() {
        assert_eq!(age("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(age("12h"), Ok(Duration::from_secs(12 * 3600)));
        for wrong in ["", "d", "30", "-1d", "1.5d", "30m", "dé"] {
            assert!(age(wrong).is_err(), "{wrong}");
        }
    }
}
