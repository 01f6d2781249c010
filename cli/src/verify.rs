//! `cuda-agent verify`: whether stages give the same again, and whether the store still holds what it says.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use cuda_agent_engine::schedule;
use cuda_agent_engine::store::audit::{Audit, End, Progress};
use cuda_agent_engine::store::gc::Class;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::project::Project;
use crate::{CliError, Exit, print, print_json, reproduce};

/// Options of `verify`.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    again: reproduce::Again,
    /// Instead, read everything in the store and compare it with its digest; what is damaged is mended or removed
    #[arg(long, conflicts_with = "stages")]
    digests: bool,
    /// With --digests, change nothing
    #[arg(long, requires = "digests")]
    dry_run: bool,
}

/// Runs stages again, or compares digests; fails where something differs, or is damaged and could not be mended.
pub async fn verify(project: &Project, options: Options) -> Result<Exit, CliError> {
    if !options.digests {
        return reproduce::run_again(project, options.again).await;
    }
    let store = project.existing_store()?;
    if !options.dry_run {
        project.refuse_read_only(&store)?;
    }
    let bar = bar(!project.common.json);
    let mut show = |progress: Progress| {
        bar.set_length(progress.total.objects);
        bar.set_position(progress.done.objects);
        bar.set_message(schedule::bytes(progress.done.bytes));
    };
    let audit = store.audit(options.dry_run, &mut show).await?;
    bar.finish_and_clear();
    let is_good = audit.damaged.is_empty() && audit.incomplete.is_empty();
    if !options.dry_run && !is_good {
        // Nobody shall trust what they know of the store: the next run of each machine looks again.
        store.distrust_all().await?;
    }
    if project.common.json {
        let mut value = serde_json::to_value(&audit).expect("audits are plain data");
        value["mended"] = json!(audit.is_mended());
        print_json(&value);
    } else {
        print(&told(&audit));
    }
    Ok(if audit.is_mended() { Exit::Done } else { Exit::Failed })
}

fn bar(is_wanted: bool) -> ProgressBar {
    let target = match is_wanted && std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template("{spinner} {elapsed:>5} {wide_bar} {pos}/{len} objects, {msg} {eta}");
    let bar = ProgressBar::with_draw_target(None, target).with_style(style.expect("the template is right"));
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

fn told(audit: &Audit) -> String {
    let mut text = String::new();
    for class in [Class::Records, Class::Blobs, Class::Rows] {
        let sum = audit.checked.get(&class).copied().unwrap_or_default();
        text.push_str(&format!("{class:<8} {:>10}  {}\n", sum.objects, schedule::bytes(sum.bytes)));
    }
    for damaged in &audit.damaged {
        let end = match &damaged.end {
            End::Mended => "was damaged; mended from this machine's copy".to_owned(),
            End::Removed => "was damaged; removed, so that the next run makes it again".to_owned(),
            End::Left => "is damaged".to_owned(),
            End::Unreadable(error) => format!("cannot be read: {error}"),
        };
        text.push_str(&format!("{} {end}\n", damaged.name));
    }
    for record in &audit.incomplete {
        let (key, kind, missing) = (record.key.short(), &record.kind, record.missing);
        text.push_str(&format!("record {key} of {kind}: {missing} blobs are missing; the next run makes it again\n"));
    }
    if audit.damaged.is_empty() && audit.incomplete.is_empty() {
        text.push_str("Everything is as its digest says.\n");
    }
    text
}
