//! The name that the CPU device has for its own things in one build, drawn anew so that a candidate can't know it.

use cuda_agent_sandbox::diagnostic::CompileFailure;
use cuda_agent_sandbox::fault::EvaluatorError;
use cuda_agent_sandbox::random::secret;

/// What the embedded files call the device's own; macros begin with the same in capitals.
pub const EMBEDDED_NAME: &str = "cuda_cpu";
const EMBEDDED_MACROS: &str = "CUDA_CPU";

/// The functions of `abi.h`, after [`EMBEDDED_NAME`].
const ABI: [&str; 15] = [
    "_register",
    "_register_shared",
    "_launch",
    "_opt_in",
    "_copy",
    "_fill",
    "_barrier",
    "_warp",
    "_fence",
    "_atomic",
    "_atomic_changed_nothing",
    "_clock",
    "_trap",
    "_dynamic_shared",
    "_switch",
];

/// What takes the place of [`EMBEDDED_NAME`] in one build, so that a candidate can't name it.
#[derive(Debug)]
pub struct OwnName(String);

impl OwnName {
    /// A new one.
    pub fn draw() -> Result<Self, EvaluatorError> {
        Ok(Self(format!("{EMBEDDED_NAME}_x{:016x}", secret()?)))
    }

    /// What names of the device's own begin with.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn macros(&self) -> String {
        self.0.replacen(EMBEDDED_NAME, EMBEDDED_MACROS, 1)
    }

    /// Where the candidate's source begins in the preprocessed text.
    pub fn begins(&self) -> String {
        format!("#pragma {}_begins\n", self.0)
    }

    /// A text of ours, or a path, with this name.
    pub fn given_to(&self, text: &str) -> String {
        text.replace(EMBEDDED_NAME, &self.0).replace(EMBEDDED_MACROS, &self.macros())
    }

    fn taken_from(&self, text: &str) -> String {
        text.replace(&self.0, EMBEDDED_NAME).replace(&self.macros(), EMBEDDED_MACROS)
    }

    /// A failure in the words of the embedded files.
    pub fn taken_from_all(&self, mut failure: CompileFailure) -> CompileFailure {
        match &mut failure {
            CompileFailure::Source(all) => all.iter_mut().for_each(|one| one.message = self.taken_from(&one.message)),
            CompileFailure::Unsupported(one) => one.message = self.taken_from(&one.message),
            CompileFailure::Fault(_) | CompileFailure::Limit(_) => {}
        }
        failure
    }

    /// For the linker.
    pub fn definitions(&self) -> impl Iterator<Item = String> {
        ABI.iter().map(|function| format!("-Wl,--defsym={}{function}={EMBEDDED_NAME}{function}", self.0))
    }

    /// Whether it is a function of `abi.h` by this name.
    pub fn is_of_abi(&self, symbol: &str) -> bool {
        symbol.strip_prefix(&self.0).is_some_and(|function| ABI.contains(&function))
    }
}
