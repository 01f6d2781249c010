//! A small disk for a machine.

use super::*;

/// A small disk for a machine's folder: a file system in memory that a process of its own keeps mounted, seen by nobody
/// else. Where this user may not mount, no file may grow beyond a size instead.
pub(super) enum Disk {
    Mounted { keeper: Child, folder: PathBuf },
    Limited { megabytes: u64 },
}

impl Disk {
    pub(super) fn new(folder: &Path, megabytes: u64) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let script = "mount -t tmpfs -o size=$2m tmpfs \"$1\" && echo mounted && read -r nothing";
        let mut keeper = Command::new("unshare");
        keeper.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        keeper.arg(folder).arg(megabytes.to_string());
        keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut keeper) = keeper.spawn() else { return Self::Limited { megabytes } };
        let mut line = String::new();
        let read = std::io::BufReader::new(keeper.stdout.as_mut().unwrap()).read_line(&mut line);
        if read.is_ok() && line == "mounted\n" {
            return Self::Mounted { keeper, folder: folder.to_owned() };
        }
        let _ = keeper.wait();
        Self::Limited { megabytes }
    }

    pub(super) fn resize(&mut self, megabytes: u64) {
        match self {
            Self::Limited { megabytes: limit } => *limit = megabytes,
            Self::Mounted { keeper, folder } => {
                let mut mount = Command::new("nsenter");
                mount.arg(format!("--mount=/proc/{}/ns/mnt", keeper.id()));
                mount.args(["mount", "-o", &format!("remount,size={megabytes}m")]).arg(folder);
                // It does not become smaller than what is on it.
                let _ = mount.stderr(Stdio::null()).status().unwrap();
            }
        }
    }

    /// Where others see what is on it.
    pub(super) fn seen(&self, path: &Path) -> PathBuf {
        match self {
            Self::Limited { .. } => path.to_owned(),
            Self::Mounted { keeper, .. } => PathBuf::from(format!("/proc/{}/root{}", keeper.id(), path.display())),
        }
    }

    /// The command, on this disk.
    pub(super) fn wrap(&self, command: &Command) -> Command {
        let (mut wrapped, script) = match self {
            Self::Limited { megabytes } => {
                (Command::new("env"), format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", megabytes * 1024))
            }
            Self::Mounted { keeper, .. } => {
                let mut enter = Command::new("nsenter");
                enter.arg(format!("--mount=/proc/{}/ns/mnt", keeper.id()));
                (enter, "cd \"$0\" && exec \"$@\"".to_owned())
            }
        };
        let folder = command.get_current_dir().unwrap();
        wrapped.args(["sh", "-c", &script]).arg(folder).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        wrapped.current_dir(folder);
        wrapped
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Self::Mounted { keeper, .. } = self {
            drop(keeper.stdin.take());
            let _ = keeper.wait();
        }
    }
}
