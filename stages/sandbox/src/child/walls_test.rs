//! Programs that try to get out, started through [`Walls`] and without: what works outside must be refused inside.
//!
//! All of it runs as the user that the tests run as, and where that is root once more as an ordinary one.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use tempfile::TempDir;

use super::*;

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Said(String),
    Killed(Signal),
}

use End::{Killed, Said};

fn done() -> End {
    Said("done".to_owned())
}

fn error(number: i32) -> End {
    Said(format!("errno {number}"))
}

const NO_RIGHT: i32 = libc::EACCES;
const NOT_THERE: i32 = libc::ENOENT;
const FORBIDDEN: i32 = libc::EPERM;

/// A folder that everybody may enter.
fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("ours");
    folder
}

/// The program of `attacks.cpp`.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let folder = folder();
        let (source, program) = (folder.path().join("attacks.cpp"), folder.path().join("attacks"));
        fs::write(&source, include_str!("walls/attacks.cpp")).expect("room");
        let mut compile = Command::new("g++");
        compile.args(["-O1", "-w", "-no-pie", "-pthread", "-o"]).args([&program, &source]);
        assert!(compile.status().expect("g++").success());
        (folder, program)
    });
    program
}

fn end(command: &mut Command) -> End {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().expect("it starts");
    match output.status.signal() {
        Some(signal) => Killed(Signal::try_from(signal).expect("a signal")),
        None => Said(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
    }
}

fn outside(what: &str, with: &str) -> End {
    end(Command::new(program()).args([what, with]).env_clear())
}

fn inside(what: &str, with: &str) -> End {
    end(&mut Walls::new().command(program(), &[what, with]).expect("it can be read"))
}

/// A program that waits until its input ends.
struct Waiting(Child);

impl Waiting {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("it speaks");
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn inside() -> Self {
        Self::start(Walls::new().command(program(), &["waits"]).expect("it can be read"))
    }

    fn outside() -> Self {
        let mut command = Command::new(program());
        command.arg("waits");
        Self::start(command)
    }

    /// A file of its folder in `/proc`.
    fn file(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.0.id()).into()
    }

    /// A line of its `/proc/…/status`.
    fn status(&self, name: &str) -> String {
        let status = fs::read_to_string(self.file("status")).expect("it lives");
        let line = status.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap_or_else(|| panic!("no {name}")).split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Each is done outside, but for those that only root may do, and ends like this inside.
fn assert_refused(attempts: &[(&str, &str, End)]) {
    for (what, with, refused) in attempts {
        assert_eq!(inside(what, with), *refused, "{what} {with}, inside");
        assert_ne!(*refused, done());
        assert_eq!(outside(what, with), done(), "{what} {with}, outside");
    }
}

fn killed() -> End {
    Killed(Signal::SIGSYS)
}

#[test]
fn an_honest_program_runs() {
    assert_eq!(inside("nothing", ""), done());
    assert_eq!(inside("aborts", ""), Killed(Signal::SIGABRT));
    assert_eq!(inside("counts its environment", ""), Said("0\ndone".to_owned()));
}

#[test]
fn files_cannot_be_read() {
    let folder = folder();
    let secret = folder.path().join("secret");
    fs::write(&secret, "a task's").unwrap();
    let other = folder.path().join("other-candidate");
    fs::copy(program(), &other).unwrap();
    let (secret, other) = (secret.to_string_lossy(), other.to_string_lossy());
    let ours = format!("/proc/{}/cmdline", std::process::id());
    let environment = format!("/proc/{}/environ", std::process::id());
    assert_refused(&[
        ("reads", "/etc/passwd", error(NO_RIGHT)),
        ("reads", &secret, error(NO_RIGHT)),
        ("reads", &other, error(NO_RIGHT)),
        ("reads", &ours, error(NO_RIGHT)),
        ("reads", &environment, error(NO_RIGHT)),
        ("reads", "/proc/self/status", error(NO_RIGHT)),
        ("reads", "/proc/mounts", error(NO_RIGHT)),
        ("reads", "/dev/null", error(NO_RIGHT)),
        ("reads", "/dev/zero", error(NO_RIGHT)),
        ("lists", "/", error(NO_RIGHT)),
        ("lists", &folder.path().to_string_lossy(), error(NO_RIGHT)),
        ("lists entries", "", killed()),
        ("looks up", &secret, error(NOT_THERE)),
        ("reads a link", "/proc/self/exe", error(NOT_THERE)),
    ]);
}

#[test]
fn files_cannot_be_written() {
    let folder = folder();
    let existing = folder.path().join("existing");
    fs::write(&existing, "kept").unwrap();
    let existing = existing.to_string_lossy().into_owned();
    let new = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (made, linked) = (new("made"), new("linked"));
    for (what, path) in [("makes a folder", &made), ("links", &linked), ("creates", &new("created"))] {
        assert_eq!(inside(what, path), killed(), "{what}");
        assert!(!Path::new(path).exists());
        assert_eq!(outside(what, path), done(), "{what}");
    }
    assert_refused(&[
        ("writes", &existing, killed()),
        ("writes", "/dev/null", killed()),
        ("creates without a name", &folder.path().to_string_lossy(), killed()),
        ("changes rights", &existing, killed()),
    ]);
    for what in ["truncates", "removes"] {
        assert_eq!(inside(what, &existing), killed(), "{what}");
        assert_eq!(fs::read_to_string(&existing).unwrap(), "kept");
    }
    assert_eq!(inside("renames", &existing), killed());
    assert_refused(&[("truncates", &existing, killed()), ("removes", &existing, killed())]);
}

#[test]
fn no_network_not_even_loopback() {
    let folder = folder();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let path = folder.path().join("socket");
    let _unix = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    assert_refused(&[
        ("connects tcp", &tcp.local_addr().unwrap().port().to_string(), killed()),
        ("connects udp", &udp.local_addr().unwrap().port().to_string(), killed()),
        ("connects unix", &path.to_string_lossy(), killed()),
        ("pairs sockets", "", killed()),
    ]);
}

#[test]
fn no_processes_threads_or_programs() {
    assert_refused(&[
        ("clones", "", killed()),
        ("starts a thread", "", killed()),
        ("starts itself", "", killed()),
        ("makes a memory file", "", killed()),
        ("begins a session", "", killed()),
        ("leaves its group", "", killed()),
        #[cfg(target_arch = "x86_64")]
        ("forks", "", killed()),
    ]);
    // Outside, another program speaks.
    for what in ["starts", "starts from memory"] {
        assert_eq!([inside(what, "/bin/true"), outside(what, "/bin/true")], [killed(), Said(String::new())], "{what}");
    }
}

#[test]
fn other_processes_are_out_of_reach() {
    let victim = Waiting::outside();
    let id = victim.0.id().to_string();
    for what in ["signals", "signals a thread", "signals a thread by its number", "queues a signal", "signals a group"]
    {
        assert_eq!(inside(what, &id), killed(), "{what}");
    }
    let ours = std::process::id().to_string();
    assert_eq!(inside("signals", &ours), killed());
    assert_refused(&[
        ("traces", &id, killed()),
        ("reads memory of", &id, killed()),
        ("opens a process", &id, killed()),
        ("sets limits of", &id, killed()),
    ]);
    // Its pipe, by way of /proc.
    let pipe = victim.file("fd/1").to_string_lossy().into_owned();
    assert_refused(&[("writes", &pipe, killed()), ("reads", &victim.file("maps").to_string_lossy(), error(NO_RIGHT))]);
    assert_eq!(inside("reads", &pipe), error(NO_RIGHT));
    assert_eq!(victim.status("State"), "S (sleeping)");
    // It could be killed all along.
    assert_eq!(outside("signals", &id), done());
}

#[test]
fn nothing_is_open_but_what_is_passed() {
    // Ours, without the mark that closes it in children.
    let careless = fs::File::open("/dev/null").unwrap();
    nix::fcntl::fcntl(&careless, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let count = |walls: Walls| end(&mut walls.command(program(), &["counts descriptors"]).unwrap());
    assert_eq!(count(Walls::new()), Said("3\ndone".to_owned()));
    let mut walls = Walls::new();
    let (mut reader, writer) = io::pipe().unwrap();
    let number = walls.passing(writer);
    assert!(number > 2);
    assert_eq!(count(walls), Said("4\ndone".to_owned()));
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("nobody holds it any more");
    drop(careless);
}

#[test]
fn the_kernels_other_doors_are_closed() {
    let folder = folder();
    let path = folder.path().to_string_lossy().into_owned();
    let all =
        ["makes shared memory", "sets up io_uring", "loads bpf", "keeps a key", "becomes root", "leaves namespaces"];
    for what in all.into_iter().chain(["changes root"]) {
        assert_eq!(inside(what, ""), killed(), "{what}");
    }
    assert_eq!(inside("mounts", &path), killed());
    assert_refused(&[
        ("makes shared memory", "", killed()),
        ("shares memory", "", killed()),
        ("outlives its parent", "", error(FORBIDDEN)),
        ("raises a limit", "", error(FORBIDDEN)),
    ]);
    #[cfg(target_arch = "x86_64")]
    for what in ["calls by 32 bits", "calls by x32"] {
        assert_eq!(inside(what, ""), killed(), "{what}");
    }
    if geteuid().is_root() && probe().unwrap().user {
        assert_refused(&[
            ("becomes root", "", killed()),
            ("leaves namespaces", "", killed()),
            ("changes root", "", killed()),
        ]);
    }
}

#[test]
fn a_program_behind_walls_has_no_rights() {
    let [in_walls, beside, out] = [Waiting::inside(), Waiting::inside(), Waiting::outside()];
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&in_walls.status(name), 16), Ok(0), "{name}");
    }
    assert_eq!([in_walls.status("NoNewPrivs"), in_walls.status("Seccomp")], ["1", "2"]);
    assert_eq!(out.status("Seccomp"), "0");
    let limits = fs::read_to_string(in_walls.file("limits")).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).expect("a limit");
        line.split_whitespace().take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    for (name, most) in
        [("Max file size", "0"), ("Max processes", "0"), ("Max core file size", "0"), ("Max open files", "64")]
    {
        assert_eq!(limit(name), [most, most], "{name}");
    }
    let given = Walls::new().limiting(Resource::RLIMIT_FSIZE, 100).limiting(Resource::RLIMIT_NOFILE, 9);
    let given = Waiting::start(given.command(program(), &["waits"]).unwrap());
    let limits = fs::read_to_string(given.file("limits")).unwrap();
    assert!(limits.contains("Max file size             100                  100 "), "{limits}");
    assert!(limits.contains("Max open files            9                    9 "), "{limits}");
    assert_eq!(fs::read_to_string(in_walls.file("oom_score_adj")).unwrap(), "1000\n");
    if geteuid().is_root() && !probe().unwrap().user {
        eprintln!("note: root can become nobody else here");
    } else if geteuid().is_root() {
        let users = [&in_walls, &beside].map(|program| program.status("Uid"));
        assert_ne!(users[0], users[1]);
        for user in users {
            let numbers: Vec<u32> = user.split(' ').map(|number| number.parse().unwrap()).collect();
            assert!(numbers.iter().all(|number| *number == numbers[0] && *number >= 1_500_000_000), "{user}");
        }
        assert_eq!(in_walls.status("Groups"), "");
    }
    assert!(
        fs::read_link(in_walls.file("cwd")).is_err() || fs::read_link(in_walls.file("cwd")).unwrap() == Path::new("/")
    );
}

#[test]
fn namespaces_are_not_ours_where_the_system_allows_it() {
    let [in_walls, out] = [Waiting::inside(), Waiting::outside()];
    if !probe().unwrap().namespaces {
        eprintln!("note: this system allows no namespaces");
        return;
    }
    // Readable for root alone, since the other has no rights.
    if geteuid().is_root() {
        for name in ["net", "ipc", "uts"] {
            let [inside, outside] =
                [&in_walls, &out].map(|program| fs::read_link(program.file(&format!("ns/{name}"))).unwrap());
            assert_ne!(inside, outside, "{name}");
        }
        let devices = fs::read_to_string(in_walls.file("net/dev")).unwrap();
        assert_eq!(
            devices.lines().skip(2).filter(|line| !line.trim_start().starts_with("lo:")).count(),
            0,
            "{devices}"
        );
    }
}

/// What a system may lack is noted.
#[test]
fn all_walls_stand_here() {
    let held = probe().unwrap();
    assert!(held.calls, "no seccomp");
    assert!(held.user || geteuid().is_root(), "capabilities can't be dropped");
    let all = [(held.files, "Landlock"), (held.namespaces, "namespaces"), (held.user, "user that root may become")];
    for (stands, name) in all {
        if !stands {
            eprintln!("note: this system has no {name}");
        }
    }
}

#[test]
fn a_program_ends_with_its_parent() {
    // By parent the kernel means the thread that started it.
    let command = Walls::new().command(program(), &["waits"]).unwrap();
    let start = std::thread::spawn(move || Waiting::start(command)).join().unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    let is_gone = || !start.status("State").starts_with('S');
    while !is_gone() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(is_gone(), "{}", start.status("State"));
}

/// The same tests in a process of an ordinary user.
#[test]
fn an_ordinary_user_is_behind_the_same_walls() {
    if !geteuid().is_root() {
        eprintln!("note: not root: the tests beside this one have shown it, and those for root have not run");
        return;
    }
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    // The file may lie in a folder that nobody else can enter.
    let tests = fs::File::open(std::env::current_exe().unwrap()).unwrap();
    nix::fcntl::fcntl(&tests, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let mut command = Command::new(format!("/proc/self/fd/{}", tests.as_raw_fd()));
    command.args(["child::walls::tests::", "--test-threads=2", "--skip", "an_ordinary_user_is"]);
    command.uid(NOBODY).gid(NOBODY).current_dir("/").env("TMPDIR", "/tmp").env("HOME", "/nonexistent");
    let output = match command.output() {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            eprintln!("note: there is no ordinary user here");
            return;
        }
        output => output.unwrap(),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("test child::walls::tests::no_network_not_even_loopback ... ok"), "{said}");
}

#[test]
#[ignore = "on a busy machine times say nothing"]
fn speed() {
    const COUNT: u32 = 300;
    let time = |start: &dyn Fn() -> Command| {
        let begin = Instant::now();
        for _ in 0..COUNT {
            assert_eq!(end(&mut start()), done());
        }
        begin.elapsed() / COUNT
    };
    inside("nothing", "");
    let outside = time(&|| {
        let mut command = Command::new(program());
        command.args(["nothing", ""]);
        super::super::limit(&mut command, [(Resource::RLIMIT_FSIZE, 0)]);
        command
    });
    let inside = time(&|| Walls::new().command(program(), &["nothing", ""]).unwrap());
    println!("a start outside {outside:?}, inside {inside:?}");
}
