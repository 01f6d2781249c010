//! Starting child processes from one thread that never ends.
//!
//! Children ask the kernel to be killed when their parent dies, and by parent it means the *thread* that started
//! them: a child that a short-lived thread started would be killed when that thread is done.

use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};

type Job = (Command, SyncSender<(Command, std::io::Result<Child>)>);

/// Starts a child, as `command.spawn()` does.
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    let (answer, answered) = sync_channel(1);
    let gone = |_| std::io::Error::other("the thread that starts processes is gone");
    // The thread needs a command of its own; the caller gets it back.
    let owned = std::mem::replace(command, Command::new(""));
    spawner().send((owned, answer)).map_err(|_| gone(()))?;
    let (owned, child) = answered.recv().map_err(|_| gone(()))?;
    *command = owned;
    child
}

fn spawner() -> &'static Sender<Job> {
    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (jobs, waiting) = channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in waiting {
                let child = command.spawn();
                // The caller waits for it.
                let _ = answer.send((command, child));
            }
        });
        jobs
    })
}
