//! The wall around files: a Landlock ruleset, made before the fork.

use std::os::fd::OwnedFd;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, Scope,
};

/// Everything that Linux 6.12 knows is handled; older kernels take what they know.
const NEWEST: ABI = ABI::V6;

/// The ruleset under which `program` and its loader can be executed and these be read; `None` where there is no Landlock.
pub fn ruleset<'a>(program: &Path, loader: Option<&Path>, readable: impl Iterator<Item = &'a Path>) -> Option<OwnedFd> {
    make(program, loader, readable).ok().flatten()
}

fn make<'a>(
    program: &Path,
    loader: Option<&Path>,
    readable: impl Iterator<Item = &'a Path>,
) -> Result<Option<OwnedFd>, RulesetError> {
    let executable = [Some(program), loader].into_iter().flatten();
    let executable = executable.map(|path| (path, AccessFs::ReadFile | AccessFs::Execute));
    let rules = executable.chain(readable.map(|path| (path, BitFlags::from(AccessFs::ReadFile))));
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(rules.filter_map(|(path, access)| {
            let path = PathFd::new(path).ok()?;
            Some(Ok::<_, RulesetError>(PathBeneath::new(path, access)))
        }))?;
    Ok(ruleset.into())
}
