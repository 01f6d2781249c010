//! From a verdict to a reward.
//!
//! **Milestone** is the paper's (Eq. 1): −1 where not correct, 3 where more than 5 % faster than eager and than
//! torch.compile, 2 where so than eager alone, 1 otherwise, also where faster than torch.compile only. "Faster by 5 %"
//! is `(t0 − t) / t0 > 5 %`, that is `t0 / t > 1 / 0.95`. The paper compares two means; here it is the *lower end of
//! the ratio's interval* that must be above, so that luck with the clock earns nothing.
//!
//! **Continuous** is the paper's ablation: `t_compile / t_candidate`, −1 where not correct. Without a compiled baseline
//! it is eager's time that counts.
//!
//! **Weighted** is an option that a secondary description of the system names without a formula; ours is
//!
//! ```text
//! max(0, base − w_registers · min(1, registers / 255)
//!             − w_shared    · min(1, shared_bytes / 227 KiB)
//!             − w_code      · min(1, code_bytes / 16 KiB))
//! ```
//!
//! with the milestone as base, or `1 + log2(ratio)` between 0 and 5 (which is 1, 2 and 3 for as fast, twice and four
//! times as fast). −1 where not correct, so that any correct candidate is above all others whatever the weights.
//!
//! A candidate of which nothing can be said (its task fails, the device lacks what it uses) has **no** reward: a number
//! would teach something about the machine.

use serde::{Deserialize, Serialize};

use crate::compile::tokens::{Dialect, Kind, Token, tokens};
use crate::compile::{Built, KernelResources};
use crate::profile::trials::Interval;
use crate::program::{Kernel, Launch};

/// What faster by 5 % means for a ratio of times.
pub const FASTER: f64 = 1.0 / 0.95;

/// The reward of whatever is not correct: compile errors and refused candidates too.
pub const INCORRECT: f64 = -1.0;

const MOST_REGISTERS: f64 = 255.0;
const MOST_SHARED_BYTES: f64 = 227.0 * 1024.0;
const MOST_CODE_BYTES: f64 = 16.0 * 1024.0;
const MOST_OF_LOGARITHM: f64 = 5.0;

/// How a reward is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// The paper's.
    Milestone,
    /// The paper's ablation.
    Continuous,
    /// A base less penalties.
    Weighted(Base, Weights),
}

/// What penalties are taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Base {
    /// The milestone.
    Milestone,
    /// One plus the binary logarithm of the continuous reward.
    LogSpeedup,
}

/// The largest penalty for each thing; 0 or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Weights {
    /// Of registers a thread.
    pub registers: f64,
    /// Of shared memory a block.
    pub shared_memory: f64,
    /// Of source.
    pub code: f64,
}

/// What a candidate takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Registers a thread, of the kernel with the most; 0 where the device has none to count.
    pub registers: u64,
    /// Shared memory a block, of the kernel with the most.
    pub shared_bytes: u64,
    /// [`code_bytes`] of its source.
    pub code_bytes: u64,
}

impl Cost {
    /// Of what was compiled from `source`.
    pub fn of(built: &Built, source: &str) -> Self {
        let registers = built.resources.iter().map(|kernel| u64::from(kernel.registers)).max();
        let in_kernels = built.resources.iter().map(|kernel| u64::from(kernel.shared_bytes));
        let in_launches =
            built.program.launches().map(|(kernel, launch)| shared_bytes(kernel, launch, &built.resources));
        Self {
            registers: registers.unwrap_or(0),
            shared_bytes: in_kernels.chain(in_launches).max().unwrap_or(0),
            code_bytes: code_bytes(source),
        }
    }
}

/// What a launch takes: its own, and what its kernel has anyway. A symbol holds its kernel's name, mangled or not; of
/// several that fit, the largest counts.
fn shared_bytes(launched: &Kernel, launch: &Launch, resources: &[KernelResources]) -> u64 {
    let is_launched = |kernel: &&KernelResources| {
        let name = kernel.kernel.split('(').next().unwrap_or_default();
        launched.symbol.contains(name)
    };
    let fixed = resources.iter().filter(is_launched).map(|kernel| u64::from(kernel.shared_bytes)).max();
    u64::from(launch.shared_bytes) + fixed.unwrap_or(0)
}

/// What a verdict comes down to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Judgement {
    /// Right; with the ratios to eager and torch.compile that were measured.
    Correct {
        /// How many times faster than eager.
        eager: Option<Interval>,
        /// How many times faster than torch.compile.
        compile: Option<Interval>,
    },
    /// Wrong, refused, or no program at all.
    Incorrect,
    /// Nothing can be said of the candidate.
    Unjudged,
}

/// The reward; `None` where nothing can be said. A correct candidate without any times gets 1, as one that is just as
/// fast.
pub fn reward(scheme: &Scheme, judgement: &Judgement, cost: &Cost) -> Option<f64> {
    match judgement {
        Judgement::Unjudged => None,
        Judgement::Incorrect => Some(INCORRECT),
        Judgement::Correct { eager, compile } => Some(match scheme {
            Scheme::Milestone => milestone(*eager, *compile),
            Scheme::Continuous => continuous(*eager, *compile),
            Scheme::Weighted(base, weights) => (base.of(*eager, *compile) - weights.penalty(cost)).max(0.0),
        }),
    }
}

fn milestone(eager: Option<Interval>, compile: Option<Interval>) -> f64 {
    let faster = |ratio: Option<Interval>| ratio.is_some_and(|ratio| ratio.low > FASTER);
    match (faster(eager), faster(compile)) {
        (true, true) => 3.0,
        (true, false) => 2.0,
        (false, _) => 1.0,
    }
}

fn continuous(eager: Option<Interval>, compile: Option<Interval>) -> f64 {
    compile.or(eager).map_or(1.0, |ratio| ratio.estimate)
}

impl Base {
    fn of(self, eager: Option<Interval>, compile: Option<Interval>) -> f64 {
        match self {
            Self::Milestone => milestone(eager, compile),
            Self::LogSpeedup => (1.0 + continuous(eager, compile).log2()).clamp(0.0, MOST_OF_LOGARITHM),
        }
    }
}

impl Weights {
    fn penalty(&self, cost: &Cost) -> f64 {
        let share = |amount: u64, most: f64| (amount as f64 / most).min(1.0);
        self.registers * share(cost.registers, MOST_REGISTERS)
            + self.shared_memory * share(cost.shared_bytes, MOST_SHARED_BYTES)
            + self.code * share(cost.code_bytes, MOST_CODE_BYTES)
    }
}

/// How much source a candidate has, so that neither comments nor layout cost anything: its bytes outside comments that
/// are no white space. Whichever compiler reads more as code counts, and where what is a comment is doubtful, all does.
pub fn code_bytes(source: &str) -> u64 {
    [Dialect::Edg, Dialect::Gcc].map(|dialect| code_bytes_to(source, dialect)).into_iter().max().unwrap_or(0)
}

fn code_bytes_to(source: &str, dialect: Dialect) -> u64 {
    let tokens = tokens(source, dialect);
    let certain = tokens.doubtful.unwrap_or(source.len());
    let is_code = |token: &&Token| !matches!(token.kind, Kind::Comment | Kind::Space);
    let code = tokens.all.iter().filter(|token| token.range.start < certain).filter(is_code);
    let counted = |token: &Token| without_blanks(&source[token.range.start..token.range.end.min(certain)]);
    code.map(counted).sum::<u64>() + without_blanks(&source[certain..])
}

fn without_blanks(text: &str) -> u64 {
    text.bytes().filter(|byte| !byte.is_ascii_whitespace()).count() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::compile::Artifact;
    use crate::compile::DeclaredLaunch;
    use crate::program::Program;

    fn ratio(low: f64) -> Option<Interval> {
        Some(Interval { estimate: low * 1.01, low, high: low * 1.02 })
    }

    fn correct(eager: Option<Interval>, compile: Option<Interval>) -> Judgement {
        Judgement::Correct { eager, compile }
    }

    fn of(scheme: Scheme, judgement: Judgement) -> Option<f64> {
        reward(&scheme, &judgement, &Cost::default())
    }

    #[test]
    fn milestones_are_the_papers() {
        let (slow, fast) = (ratio(1.052), ratio(1.053));
        for (eager, compile, expected) in [
            (fast, fast, 3.0),
            (fast, slow, 2.0),
            (slow, fast, 1.0),
            (slow, slow, 1.0),
            (fast, None, 2.0),
            (None, None, 1.0),
        ] {
            assert_eq!(of(Scheme::Milestone, correct(eager, compile)), Some(expected), "{eager:?} {compile:?}");
        }
    }

    #[test]
    fn a_milestone_is_judged_by_the_lower_end() {
        let likely = Some(Interval { estimate: 1.2, low: 1.04, high: 1.4 });
        assert_eq!(of(Scheme::Milestone, correct(likely, likely)), Some(1.0));
        let exactly = ratio(FASTER);
        assert_eq!(of(Scheme::Milestone, correct(exactly, exactly)), Some(1.0), "more than 5 %, not 5 %");
    }

    #[test]
    fn the_continuous_reward_is_the_ratio_to_the_compiled_baseline() {
        let of = |eager, compile| of(Scheme::Continuous, correct(eager, compile)).unwrap();
        assert!((of(ratio(3.0), ratio(2.0)) - 2.02).abs() < 1e-9);
        assert!((of(ratio(3.0), None) - 3.03).abs() < 1e-9);
        assert_eq!(of(None, None), 1.0);
    }

    #[test]
    fn penalties_follow_their_formula() {
        let weights = Weights { registers: 0.5, shared_memory: 0.2, code: 0.1 };
        let cost = Cost { registers: 51, shared_bytes: 227 * 512, code_bytes: 1 << 20 };
        let weighted = |base| reward(&Scheme::Weighted(base, weights), &correct(ratio(2.0), ratio(4.0 / 1.01)), &cost);
        assert!((weighted(Base::Milestone).unwrap() - (3.0 - 0.1 - 0.1 - 0.1)).abs() < 1e-9);
        assert!((weighted(Base::LogSpeedup).unwrap() - (3.0 - 0.3)).abs() < 1e-9);
    }

    #[test]
    fn a_cost_is_that_of_the_kernel_with_the_most() {
        let kernel = |name: &str, registers, shared_bytes| KernelResources {
            kernel: name.to_owned(),
            registers,
            shared_bytes,
            local_bytes: 0,
            spill_store_bytes: 0,
            spill_load_bytes: 0,
        };
        let launch = |symbol: &str, shared_bytes| DeclaredLaunch {
            symbol: symbol.to_owned(),
            grid: [1; 3],
            block: [32, 1, 1],
            shared_bytes,
            arguments: 2,
        };
        let built = Built {
            artifact: Artifact::Cubin("x.cubin".into()),
            program: Program::declared(&[launch("_Z3sumPKfPf", 512), launch("scale", 0)]),
            scratch_bytes: 0,
            resources: vec![kernel("sum(float const*, float*)", 40, 1024), kernel("scale", 20, 1200)],
            compiler: "nvrtc 13.0".to_owned(),
            seconds: 0.1,
        };
        let cost = Cost::of(&built, "int a; // b");
        assert_eq!(cost, Cost { registers: 40, shared_bytes: 1536, code_bytes: 5 });
        let host = Built { program: Program::default(), resources: vec![], ..built };
        assert_eq!(Cost::of(&host, ""), Cost::default());
    }

    #[test]
    fn nothing_said_is_nothing_rewarded() {
        for scheme in schemes() {
            assert_eq!(of(scheme, Judgement::Unjudged), None);
            assert_eq!(of(scheme, Judgement::Incorrect), Some(-1.0));
        }
    }

    #[test]
    fn comments_and_layout_cost_nothing() {
        for (source, bytes) in [
            ("int a ; // why\n int b;", 10),
            ("/* a\n b */ x/y", 3),
            ("\"// no comment\"", 13),
            ("'\"' // \"", 3),
            ("\"\\\"/*\" a", 7),
            ("1'000 // a\n2", 6),
            ("/* open", 0),
            ("é//é", 2),
            ("", 0),
            ("// a \\\n b\nc", 1),
        ] {
            assert_eq!(code_bytes(source), bytes, "{source}");
        }
    }

    #[test]
    fn no_text_makes_a_comment_of_code() {
        const CODE: &str = "int code[1];";
        let bytes = code_bytes(CODE);
        for before in [
            "R\"(/*)\"",
            "R\"x()\"/*)x\"",
            "u8R\"(//)\"",
            "R\"(\"//)\"",
            "\"a\\\n//\"",
            "case'/*':",
            "1'0'/*'",
            "// \\ \n",
            "//\r",
            "// ??/\n",
            "#if __has_include(</*>)\n#endif\n",
            "#define H __has_include\n#if H(</*>)\n#endif\n",
            "#if 0\nR\"(\n#endif\n)\" /* \"",
            "#define R \"\" /\n",
            "'\\'' \"/*\"",
        ] {
            let whole = code_bytes(&format!("{before}{CODE}"));
            assert!(whole >= bytes, "{before}: {whole}");
        }
    }

    fn schemes() -> [Scheme; 4] {
        let heavy = Weights { registers: 9.0, shared_memory: 9.0, code: 9.0 };
        let light = Weights { registers: 0.1, shared_memory: 0.1, code: 0.1 };
        [
            Scheme::Milestone,
            Scheme::Continuous,
            Scheme::Weighted(Base::Milestone, heavy),
            Scheme::Weighted(Base::LogSpeedup, light),
        ]
    }

    prop_compose! {
        fn costs()(registers in 0..512_u64, shared_bytes in 0..1_u64 << 20, code_bytes in 0..1_u64 << 20) -> Cost {
            Cost { registers, shared_bytes, code_bytes }
        }
    }

    proptest! {
        #[test]
        fn faster_is_never_worth_less(
            eager in 0.01..100.0_f64,
            compile in 0.01..100.0_f64,
            gain in 1.0..10.0_f64,
            cost in costs(),
        ) {
            for scheme in schemes() {
                let judged = |gain: f64| correct(ratio(eager * gain), ratio(compile * gain));
                let at = |gain: f64| reward(&scheme, &judged(gain), &cost).unwrap();
                prop_assert!(at(gain) >= at(1.0), "{scheme:?}");
            }
        }

        #[test]
        fn correct_is_always_worth_more_than_incorrect(
            eager in 0.001..100.0_f64,
            compile in prop::option::of(0.001..100.0_f64),
            cost in costs(),
        ) {
            for scheme in schemes() {
                let correct = reward(&scheme, &correct(ratio(eager), compile.and_then(ratio)), &cost);
                prop_assert!(correct > reward(&scheme, &Judgement::Incorrect, &cost), "{scheme:?}");
            }
        }

        #[test]
        fn taking_more_is_never_worth_more(cost in costs(), more in 0..1_u64 << 20) {
            let dearer = [
                Cost { registers: cost.registers + more, ..cost },
                Cost { shared_bytes: cost.shared_bytes + more, ..cost },
                Cost { code_bytes: cost.code_bytes + more, ..cost },
            ];
            for (scheme, dearer) in schemes().into_iter().flat_map(|scheme| dearer.map(|dearer| (scheme, dearer))) {
                let with = |cost: &Cost| reward(&scheme, &correct(ratio(2.0), ratio(1.5)), cost);
                prop_assert!(with(&dearer) <= with(&cost), "{scheme:?}");
            }
        }

        #[test]
        fn any_text_has_a_size(source in "\\PC{0,40}(/\\*|//|\"|'|\\\\|\n|x){0,20}") {
            prop_assert!(code_bytes(&source) <= source.len() as u64);
        }
    }
}
