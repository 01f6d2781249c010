//! A program's files, put where it starts: exactly those that its key names, as the key names them.
//!
//! What lies on the disk may be edited while a run goes on, and a program can write where it was started from. So each
//! file is digested as it is copied, and compared with what the key says; what was unpacked earlier is compared again
//! before each start, and once more before anything is published.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use cuda_agent_protocol::PYTHON_TWIN;
use nix::fcntl::{Flock, FlockArg};

use super::failure::Failure;
use super::files::set_mode;
use super::job::Job;
use crate::artifact::ArtifactError;
use crate::catalog::{Kind, ProgramFiles};
use crate::digest::Digest;
use crate::key::ProgramIdentity;
use crate::spec::Command;

/// What to start.
pub struct Program {
    /// Program and arguments.
    pub words: Vec<String>,
    /// The folders that Python shall look into.
    pub search: Vec<PathBuf>,
}

/// Puts the files of a job's program into their place.
pub fn place(job: &Job, folder: &Path) -> Result<Program, Failure> {
    match &job.stage().command {
        Some(command) => {
            place_command_files(job, folder)?;
            let words = match command {
                Command::Shell(text) => vec!["/bin/sh".into(), "-euc".into(), text.clone()],
                Command::Words(words) => words.clone(),
            };
            Ok(Program { words, search: Vec::new() })
        }
        None => installed(job),
    }
}

/// Whether the unpacked program is still what its key names; an error says which file is not.
pub fn check(job: &Job) -> Result<(), Failure> {
    let Some(unpacked) = job.kind.as_deref().and_then(|kind| Unpacked::of(job, kind)) else { return Ok(()) };
    match unpacked.difference() {
        None => Ok(()),
        // Where every row was there already no program was started here, and none may ever have been unpacked.
        Some(_) if !unpacked.root.exists() => Ok(()),
        Some(file) => Err(Failure::retryable(format!(
            "`{file}` in the folder of the program's own source was written while it ran, so nothing was published"
        ))
        .with_hint("programs write to outputs/, to TMPDIR, or to the request's state_dir, never beside their source")),
    }
}

/// Copies the files of a `uses: run` stage into the folder in which its command starts.
fn place_command_files(job: &Job, folder: &Path) -> Result<(), Failure> {
    let ProgramIdentity::Command { files, .. } = &job.resolved.preimage.program else { return Ok(()) };
    let found: BTreeMap<&String, &PathBuf> = job.command_files.iter().map(|(name, real)| (name, real)).collect();
    if let Some(name) = found.keys().find(|name| !files.contains_key(**name)) {
        return Err(edited(name));
    }
    for (name, digest) in files {
        let real = found.get(name).ok_or_else(|| edited(name))?;
        let path = folder.join(name);
        if Path::new(name).components().any(|part| part == Component::ParentDir) {
            return Err(Failure::permanent(format!("the file `{name}` lies above the pipeline's folder"))
                .with_hint("put the files of a `uses: run` stage beside the pipeline file or below it"));
        }
        if path.exists() {
            return Err(Failure::permanent(format!("the file `{name}` would replace one that the engine makes"))
                .with_hint("request.json, tmp/ and the stage's inputs/ are the engine's; give the file another name"));
        }
        copy(real, &path)?;
        if Digest::of_file(&path).map_err(ArtifactError::io(&path))? != *digest {
            return Err(edited(name));
        }
        set_mode(&path, job.resolved.preimage.executable.contains(name))?;
    }
    Ok(())
}

/// A file that is no longer what it was when the stage was looked up.
fn edited(name: &str) -> Failure {
    let message = format!("`{name}` was edited after the run had read it, so the stage was not started");
    Failure::permanent(message).with_hint("run again: the stage is looked up anew with the file as it is then")
}

fn copy(from: &Path, to: &Path) -> Result<(), ArtifactError> {
    let above = to.parent().expect("a file has a folder");
    fs::create_dir_all(above).map_err(ArtifactError::io(above))?;
    fs::copy(from, to).map_err(ArtifactError::io(from))?;
    Ok(())
}

fn installed(job: &Job) -> Result<Program, Failure> {
    let run = &job.stage().kind.run;
    let unpacked = job.kind.as_deref().and_then(|kind| Unpacked::of(job, kind));
    if let Some(unpacked) = &unpacked {
        unpacked.install()?;
    }
    let own = unpacked.as_ref().map(|unpacked| unpacked.root.join(unpacked.below)).unwrap_or_default();
    let word = |(place, word): (usize, &String)| match (place, word.as_str()) {
        (0, "python") => job.context.python.display().to_string(),
        (0, "cuda-agent") => "/proc/self/exe".to_owned(),
        _ if own.join(word).exists() => own.join(word).display().to_string(),
        _ => word.clone(),
    };
    if let (Some(unpacked), Some(first)) = (&unpacked, run.first()) {
        unpacked.refuse_plain_file(first)?;
    }
    let words = run.iter().enumerate().map(word).collect();
    Ok(Program { words, search: unpacked.map(|unpacked| unpacked.search(&own)).unwrap_or_default() })
}

/// The files of a kind's program, in a folder that is named after them.
struct Unpacked<'a> {
    root: PathBuf,
    /// The manifest's folder.
    below: &'a str,
    files: BTreeMap<&'a str, File<'a>>,
}

struct File<'a> {
    digest: Digest,
    executable: bool,
    content: Content<'a>,
}

enum Content<'a> {
    Here(&'a [u8]),
    At(&'a Path),
}

impl<'a> Unpacked<'a> {
    /// `None` where there is nothing to unpack.
    fn of(job: &Job, kind: &'a Kind) -> Option<Self> {
        let here = |bytes: &'a [u8]| File {
            digest: Digest::of_bytes(bytes),
            executable: false,
            content: Content::Here(bytes),
        };
        let (mut files, below): (BTreeMap<&str, File>, &str) = match &kind.program {
            ProgramFiles::None => return None,
            ProgramFiles::Embedded { files, folder } => {
                (files.iter().map(|(name, bytes)| (*name, here(bytes))).collect(), folder)
            }
            ProgramFiles::Disk { files, folder } => {
                // Of files that are another device's alone there is no digest: the program does not get them.
                let ProgramIdentity::Files(digests) = &job.resolved.preimage.program else { return None };
                let file = |(name, real): &'a (String, PathBuf)| {
                    let (executable, content) = (kind.executable.contains(name), Content::At(real));
                    Some((name.as_str(), File { digest: *digests.get(name)?, executable, content }))
                };
                (files.iter().filter_map(file).collect(), folder)
            }
        };
        let (twin, text) = PYTHON_TWIN;
        if !files.keys().any(|name| name.ends_with(twin)) {
            files.insert(twin, here(text.as_bytes()));
        }
        let mut hasher = blake3::Hasher::new();
        for (name, file) in &files {
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
            hasher.update(&file.digest.0).update(&[u8::from(file.executable)]);
        }
        let root = job.context.folders.cache.join("programs").join(&hasher.finalize().to_hex()[..32]);
        Some(Self { root, below, files })
    }

    /// The folders with Python files, the program's own first.
    fn search(&self, own: &Path) -> Vec<PathBuf> {
        let mut search: Vec<PathBuf> = Vec::new();
        for name in self.files.keys().filter(|name| name.ends_with(".py")) {
            let folder = self.root.join(name).parent().map(Path::to_owned).unwrap_or_default();
            if !search.contains(&folder) {
                search.push(folder);
            }
        }
        search.sort_by_key(|folder| folder != own);
        search
    }

    /// Writes the files, unless they are there already and are what they should be. One engine at a time does: what it has
    /// just put there must not be taken for damaged, and moved away, by another one that saw nothing there before.
    fn install(&self) -> Result<(), Failure> {
        if self.difference().is_none() {
            return Ok(());
        }
        let above = self.root.parent().expect("programs are in a folder");
        fs::create_dir_all(above).map_err(ArtifactError::io(above))?;
        let folder = fs::File::open(above).map_err(ArtifactError::io(above))?;
        // Where a file system has no locks, engines that start at once may hinder each other, and say so.
        let _alone = Flock::lock(folder, FlockArg::LockExclusive).ok();
        match self.difference() {
            None => Ok(()),
            Some(_) => self.replace(),
        }
    }

    fn replace(&self) -> Result<(), Failure> {
        let beside = |what: &str| self.root.with_extension(format!("{what}-{}", crate::nonce()));
        let partial = beside("partial");
        let written = self.write(&partial);
        if let Err(failure) = written {
            let _ = fs::remove_dir_all(&partial);
            return Err(failure);
        }
        if self.root.exists() {
            // A program wrote beside its source.
            let damaged = beside("damaged");
            let _ = fs::rename(&self.root, &damaged);
            let _ = fs::remove_dir_all(&damaged);
        }
        let renamed = fs::rename(&partial, &self.root);
        let _ = fs::remove_dir_all(&partial);
        match (renamed, self.difference()) {
            (_, None) => Ok(()),
            (Err(error), _) => Err(ArtifactError::io(&self.root)(error).into()),
            (Ok(()), Some(file)) => Err(Failure::retryable(format!("{}: another process writes it", file))),
        }
    }

    fn write(&self, partial: &Path) -> Result<(), Failure> {
        for (name, file) in &self.files {
            let path = partial.join(name);
            match file.content {
                Content::At(real) => copy(real, &path)?,
                Content::Here(bytes) => {
                    let above = path.parent().expect("a file has a folder");
                    fs::create_dir_all(above).map_err(ArtifactError::io(above))?;
                    fs::write(&path, bytes).map_err(ArtifactError::io(&path))?;
                }
            }
            if Digest::of_file(&path).map_err(ArtifactError::io(&path))? != file.digest {
                return Err(edited(name));
            }
            // Nobody has to write here. It stops no root, and no program that makes new files.
            let mode = fs::Permissions::from_mode(if file.executable { 0o555 } else { 0o444 });
            fs::set_permissions(&path, mode).map_err(ArtifactError::io(&path))?;
        }
        Ok(())
    }

    /// The first file that is not what it should be, or that should not be there.
    fn difference(&self) -> Option<String> {
        let mut expected: BTreeSet<&str> = self.files.keys().copied().collect();
        let mut waiting = vec![self.root.clone()];
        while let Some(folder) = waiting.pop() {
            let Ok(items) = fs::read_dir(&folder) else { return Some(folder.display().to_string()) };
            for path in items.filter_map(|item| item.ok().map(|item| item.path())) {
                let name = path.strip_prefix(&self.root).unwrap_or(&path).to_string_lossy().into_owned();
                let Ok(metadata) = fs::symlink_metadata(&path) else { return Some(name) };
                if metadata.is_dir() {
                    // Bytecode, which Python takes only from the cache that the engine names, unless told to ignore that.
                    if path.file_name().is_none_or(|name| name != "__pycache__") {
                        waiting.push(path);
                    }
                    continue;
                }
                let known = self.files.get(name.as_str()).filter(|_| expected.remove(name.as_str()));
                let executable = metadata.permissions().mode() & 0o100 != 0;
                let same = |file: &&File| {
                    metadata.is_file()
                        && file.executable == executable
                        && Digest::of_file(&path).is_ok_and(|digest| digest == file.digest)
                };
                if known.filter(same).is_none() {
                    return Some(name);
                }
            }
        }
        expected.first().map(|name| (*name).to_owned())
    }

    /// A manifest's `run:` that names a file which nobody may execute would end as "Permission denied".
    fn refuse_plain_file(&self, word: &str) -> Result<(), Failure> {
        let name = Path::new(self.below).join(word);
        match name.to_str().and_then(|name| self.files.get(name)) {
            Some(file) if !file.executable => {
                Err(Failure::permanent(format!("`{word}` is a file of the program, but not executable"))
                    .with_hint(format!("`chmod +x {word}`, or name its interpreter: `run: [python, {word}]`")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    fn unpacked<'a>(root: &Path, files: &'a [(String, String)]) -> Unpacked<'a> {
        let file = |(name, text): &'a (String, String)| {
            let (digest, content) = (Digest::of_bytes(text.as_bytes()), Content::Here(text.as_bytes()));
            (name.as_str(), File { digest, executable: false, content })
        };
        Unpacked { root: root.to_owned(), below: "", files: files.iter().map(file).collect() }
    }

    /// Once an engine has its program's files, no other one takes them away, not even to put the same ones there.
    #[test]
    fn engines_that_start_a_program_at_once_leave_each_other_its_files() {
        const ENGINES: usize = 4;
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<(String, String)> =
            (0..20).map(|n| (format!("{}/{n}.py", n % 3), format!("print({n})"))).collect();
        for round in 0..50 {
            let root = folder.path().join(format!("{round}"));
            if round % 2 == 1 {
                // A program wrote beside its source.
                fs::create_dir_all(&root).unwrap();
                fs::write(root.join("extra.py"), "").unwrap();
            }
            let start = Barrier::new(ENGINES);
            let engine = || {
                let unpacked = unpacked(&root, &files);
                start.wait();
                let installed = unpacked.install().map_err(|failure| failure.explanation().message);
                (0..20).fold(installed, |found, _| found.and(unpacked.difference().map_or(Ok(()), Err)))
            };
            let ended: Vec<_> = std::thread::scope(|scope| {
                let engines: Vec<_> = (0..ENGINES).map(|_| scope.spawn(engine)).collect();
                engines.into_iter().map(|engine| engine.join().unwrap()).collect()
            });
            assert!(ended.iter().all(Result::is_ok), "round {round}: {ended:?}");
            let beside = fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(beside, round + 1, "what was written for nothing is removed");
        }
    }
}
