//! What a language model does with a task: policies that answer, episodes that ask, trajectories that record.
//!
//! ```text
//! tasks ── prompts ── Policy ── answer ── Judge ── Trajectory          episode: one line from left to right,
//!            ▲                               │                         or up to `turns` of them
//!            └────────── repair ◄────────────┘
//! ```
//!
//! - [`policy`]: a conversation in, a completion out. A [`policy::Policy`] blocks and is shared by threads, since an
//!   episode is a thread. There are five: scripted (no model at all), OpenAI's chat completions, OpenAI's completions by
//!   token ids, Anthropic's messages, and a child process that holds the model ([`policy::child`]).
//! - **Token in, token out.** A policy that knows its token ids is given the ids so far and appends; what it sampled is
//!   never rendered to text and read again. A policy that doesn't is given the whole conversation, and the id columns stay
//!   null.
//! - **Random numbers** belong to (seed, task, sample, turn) ([`policy::Key`]), so an answer depends on neither the
//!   order nor the number of its neighbours, as far as the policy's arithmetic doesn't.
//! - [`prompts`]: files; [`examples`]: correct answers of earlier episodes, to be shown in prompts; [`answer`]: the one rule by which a candidate is found in an answer.
//! - [`series`]: the episodes of a task, how many and with which examples; [`episode`]: one of them, `single` (prompt → candidate → verdict) and `repair` (answer → verdict → revise).
//! - [`trajectory`]: what is kept of an episode, its table, and what must hold of it when it is written and when it is read.
//! - [`rollout`]: the by-row kind `agent/rollout`; [`show`]: an episode as people read it; [`report`]: the kind `agent/report`,
//!   which makes an evaluation of trajectories.
//!
//! Absent on purpose: tokenizers and chat templates (they belong to whoever holds the model), an async runtime, and any
//! gradient.

pub mod answer;
mod catalog;
pub mod episode;
pub mod examples;
pub mod phases;
pub mod policy;
pub mod prompts;
pub mod report;
pub mod rollout;
pub mod series;
pub mod show;
pub mod trajectory;

pub use catalog::builtin;
