//! Which Python a program was run with.
//!
//! A key says it only where a kind declares a `toolchain`; a `uses: run` stage takes the first `python3` on the PATH, and
//! another one there changes no key. So each result keeps what it was made with, for `plan` and `explain` to say.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::host::{located, modified};
use crate::spec::{Command, Stage};

/// An interpreter on the machine that made a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interpreter {
    /// Where it was.
    pub path: PathBuf,
    /// `Python 3.11.7`.
    pub version: String,
}

impl fmt::Display for Interpreter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.path.display())
    }
}

/// The interpreter that a stage's program starts, as far as its command or its files say: `python` stands for the
/// project's, any other name is looked for on the PATH. `files` are those of a `uses: run` stage.
pub fn of_stage(stage: &Stage, files: &[(String, PathBuf)], python: &Path) -> Option<Interpreter> {
    let Some(command) = &stage.command else {
        return stage.kind.run.first().filter(|word| *word == "python").and_then(|_| described(python));
    };
    let name = in_command(command, &files.iter().map(|(name, real)| (name.as_str(), real.as_path())).collect())?;
    let declared = stage.env.get("PATH").map(OsString::from);
    let search = declared.or_else(|| std::env::var_os("PATH")).unwrap_or_default();
    described(&located(Path::new(&name), &search))
}

/// The first word that is a Python, or a file whose first line names one.
fn in_command(command: &Command, files: &BTreeMap<&str, &Path>) -> Option<String> {
    let words: Vec<&str> = match command {
        Command::Shell(text) => text
            .split(|c: char| c.is_whitespace() || "'\"<>;|&()`=".contains(c))
            .filter(|word| !word.is_empty())
            .collect(),
        Command::Words(words) => words.iter().map(String::as_str).collect(),
    };
    words.into_iter().find_map(|word| {
        if is_python(word) {
            return Some(word.to_owned());
        }
        first_line(files.get(word.trim_start_matches("./"))?).and_then(|line| in_first_line(&line))
    })
}

fn is_python(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    name.strip_prefix("python").is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

fn first_line(path: &Path) -> Option<String> {
    let mut line = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    BufReader::new(std::io::Read::take(file, 256)).read_until(b'\n', &mut line).ok()?;
    String::from_utf8(line).ok()
}

/// The Python of `#!/usr/bin/env python3` or `#!/usr/bin/python3`.
fn in_first_line(line: &str) -> Option<String> {
    let words = line.strip_prefix("#!")?.split_whitespace();
    words.filter(|word| is_python(word)).map(str::to_owned).next()
}

/// Asks an interpreter for its version: once, as long as its file stays the same.
fn described(path: &Path) -> Option<Interpreter> {
    type Known = HashMap<(PathBuf, Option<u128>), Option<String>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let key = (path.to_owned(), modified(path));
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let version = known.get_or_insert_default().entry(key).or_insert_with(|| version(path)).clone()?;
    Some(Interpreter { path: path.to_owned(), version })
}

fn version(path: &Path) -> Option<String> {
    let output = std::process::Command::new(path).arg("-V").stdin(std::process::Stdio::null()).output().ok()?;
    let text = String::from_utf8(if output.stdout.is_empty() { output.stderr } else { output.stdout }).ok()?;
    Some(text.lines().next()?.trim().to_owned()).filter(|text| output.status.success() && !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_python_of_a_command_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("work.py");
        std::fs::write(&script, "#!/usr/bin/env python3.12\nprint()\n").unwrap();
        let files = BTreeMap::from([("bin/work.py", script.as_path())]);
        let shell = |text: &str| in_command(&Command::Shell(text.into()), &files);
        assert_eq!(shell("cd x && A=1 python3 work.py > out").as_deref(), Some("python3"));
        assert_eq!(shell("/opt/bin/python3.11 -c 'x'").as_deref(), Some("/opt/bin/python3.11"));
        assert_eq!(shell("./bin/work.py 5").as_deref(), Some("python3.12"));
        assert_eq!(shell("pythonic x; echo python-config mypython"), None);
        let words = Command::Words(vec!["env".into(), "python".into()]);
        assert_eq!(in_command(&words, &files).as_deref(), Some("python"));
    }

    #[test]
    fn an_interpreter_that_cannot_be_asked_is_none() {
        assert_eq!(described(Path::new("/nowhere/python3")), None);
    }
}
