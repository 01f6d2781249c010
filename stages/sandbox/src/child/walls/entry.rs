//! The way in: what a process does between fork and exec to put itself behind the walls.
//!
//! It must allocate nothing and take no lock, since another thread of the parent may have held one when it forked. All that
//! needs memory is made before.

use std::ffi::{CStr, CString, c_char};
use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::ptr;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::{Pid, getpid, getppid, write};

use super::namespaces::{Namespaces, namespaces};
use super::seccomp::Filters;

/// Which walls stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Network, IPC and host name of its own.
    pub namespaces: bool,
    /// Files, by Landlock.
    pub files: bool,
    /// A user of its own, or an ordinary one without capabilities.
    pub user: bool,
    /// System calls, by seccomp.
    pub calls: bool,
}

impl Held {
    fn exit_code(self) -> i32 {
        let bits = [self.namespaces, self.files, self.user, self.calls];
        bits.iter().enumerate().map(|(at, held)| i32::from(*held) << at).sum()
    }

    pub(super) fn from_exit_code(code: i32) -> Self {
        let bit = |at: u32| code >> at & 1 == 1;
        Self { namespaces: bit(0), files: bit(1), user: bit(2), calls: bit(3) }
    }
}

/// Users that own nothing, one for each process: `ops/measure` has others for its tasks.
const FIRST_USER: u32 = 1_500_000_000;

/// Who programs share where there are no such users.
const NOBODY: u32 = 65_534;

/// Descriptors that the program may have beyond those that are passed.
const OPEN_FILES: u64 = 64;

/// All that is needed on the way.
pub struct Entry {
    start: Option<Start>,
    passed: Vec<OwnedFd>,
    limits: Vec<(Resource, u64)>,
    landlock: Option<OwnedFd>,
    namespaces: &'static Namespaces,
    filters: Option<Filters>,
    parent: Pid,
    is_root: bool,
}

/// The program and how it is started.
struct Start {
    program: OwnedFd,
    /// Holds the empty path.
    path: SecretPage,
    /// What the pointers point to.
    _words: Vec<CString>,
    arguments: Vec<*const c_char>,
}

#[expect(unsafe_code, reason = "pointers are neither, though what they point to is never changed")]
// SAFETY: the pointers are to memory that the same struct owns, which nobody writes to.
unsafe impl Send for Start {}
#[expect(unsafe_code, reason = "pointers are neither, though what they point to is never changed")]
// SAFETY: the same.
unsafe impl Sync for Start {}

impl Entry {
    /// Into a program.
    pub fn into(
        program: &Path,
        words: Vec<CString>,
        passed: Vec<OwnedFd>,
        limits: Vec<(Resource, u64)>,
        landlock: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let arguments = words.iter().map(|word| word.as_ptr()).chain([ptr::null()]).collect();
        let program = open_for_everybody(program)?;
        let start = Start { program, path: SecretPage::new()?, _words: words, arguments };
        let filters = Filters::with_start(start.program.as_raw_fd().unsigned_abs().into(), start.path.address() as u64);
        Ok(Self { start: Some(start), passed, limits: all_limits(limits)?, filters, ..Self::to_nowhere(landlock)? })
    }

    /// Into no program: the process ends behind the walls, and its exit code says which stand.
    pub fn to_nowhere(landlock: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            start: None,
            passed: Vec::new(),
            limits: all_limits(Vec::new())?,
            landlock,
            namespaces: namespaces(),
            filters: Filters::with_start(0, 0),
            parent: getpid(),
            is_root: nix::unistd::geteuid().is_root(),
        })
    }

    /// Goes behind the walls and becomes the program; comes back where that fails. Allocates nothing.
    pub fn pass(&mut self) -> io::Result<()> {
        self.hand_over()?;
        self.limit()?;
        write_to(c"/proc/self/oom_score_adj", b"1000");
        let mut held = Held { namespaces: self.enter_namespaces(), ..Held::default() };
        prctl::set_no_new_privs()?;
        held.files = self.restrict_files();
        held.user = self.drop_privileges();
        // Only now: the user whose processes are counted is another one. Zero: not one more.
        setrlimit(Resource::RLIMIT_NPROC, 0, 0)?;
        // A change of the user takes this back, so it comes after.
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != self.parent {
            return Err(Errno::ESRCH.into());
        }
        if let Some(filters) = &mut self.filters {
            filters.know_own_process(getpid().as_raw().unsigned_abs());
            held.calls = filters.install();
        }
        match &self.start {
            Some(start) => Err(start.execute()),
            None => end(held.exit_code()),
        }
    }

    /// Nothing is open in the program but what is passed, and the streams.
    #[expect(unsafe_code, reason = "nix has no close_range")]
    fn hand_over(&self) -> io::Result<()> {
        // SAFETY: it only marks descriptors. An old kernel refuses; all that this program opens is marked already.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        for descriptor in &self.passed {
            fcntl(descriptor, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        Ok(())
    }

    fn limit(&self) -> io::Result<()> {
        self.limits.iter().try_for_each(|(resource, most)| Ok(setrlimit(*resource, *most, *most)?))
    }

    fn enter_namespaces(&self) -> bool {
        let all = &self.namespaces.0;
        !all.is_empty() && all.iter().all(|namespace| setns(namespace.as_fd(), CloneFlags::empty()).is_ok())
    }

    /// What AddressSanitizer reads at its start is this process's alone, so its rule is made here.
    #[expect(unsafe_code, reason = "the crate allocates; these are its two calls")]
    fn restrict_files(&self) -> bool {
        #[repr(C, packed)]
        struct PathBeneath {
            allowed: u64,
            parent: RawFd,
        }
        const READ_FILE: u64 = 1 << 2;
        const PATH_BENEATH: u32 = 1;
        let Some(ruleset) = self.landlock.as_ref().map(AsRawFd::as_raw_fd) else { return false };
        // It stays open in the program: the rule holds as long as the kernel remembers the file, and so it does.
        for path in [c"/proc/self/maps", c"/proc/self/cmdline", c"/proc/self/environ"] {
            if let Ok(maps) = open(path, OFlag::O_PATH, Mode::empty()) {
                let rule = PathBeneath { allowed: READ_FILE, parent: maps.as_raw_fd() };
                let rule: *const PathBeneath = &rule;
                // SAFETY: the kernel reads the rule, which lives until then.
                unsafe { libc::syscall(libc::SYS_landlock_add_rule, ruleset, PATH_BENEATH, rule, 0) };
                std::mem::forget(maps);
            }
        }
        // SAFETY: it takes a descriptor, and rights from this process.
        unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) == 0 }
    }

    /// Gives up every capability for good, and being root; whether nothing is left of either.
    #[expect(unsafe_code, reason = "the C library's functions would call other threads, which are none here")]
    fn drop_privileges(&self) -> bool {
        const LAST_POSSIBLE_CAPABILITY: i32 = 63;
        #[repr(C)]
        struct Header {
            version: u32,
            process: i32,
        }
        const VERSION_3: u32 = 0x2008_0522;
        let own = FIRST_USER + getpid().as_raw().unsigned_abs();
        let mut is_ordinary = !self.is_root;
        let (header, none) = (Header { version: VERSION_3, process: 0 }, [0u32; 6]);
        let (header, none): (*const Header, *const [u32; 6]) = (&header, &none);
        // SAFETY: system calls on numbers, and on the two structs above, which the kernel reads.
        unsafe {
            for capability in 0..=LAST_POSSIBLE_CAPABILITY {
                // EINVAL: the kernel has no such capability; EPERM: there was nothing to drop it with.
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
            if self.is_root {
                libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>());
                // A container often has a few thousand users, and somebody else's limits are better than root's rights.
                is_ordinary = [own, NOBODY].into_iter().any(|user| {
                    libc::syscall(libc::SYS_setresgid, user, user, user) == 0
                        && libc::syscall(libc::SYS_setresuid, user, user, user) == 0
                });
            }
            libc::syscall(libc::SYS_capset, header, none) == 0 && is_ordinary
        }
    }
}

impl Start {
    /// Comes back only where it fails.
    #[expect(unsafe_code, reason = "nix's fexecve allocates")]
    fn execute(&self) -> io::Error {
        let no_environment: [*const c_char; 1] = [ptr::null()];
        let (program, path) = (self.program.as_raw_fd(), self.path.address());
        let (arguments, environment) = (self.arguments.as_ptr(), no_environment.as_ptr());
        // SAFETY: the path and the words end with zeros, the lists with null; all live until the call is done.
        unsafe { libc::syscall(libc::SYS_execveat, program, path, arguments, environment, libc::AT_EMPTY_PATH) };
        io::Error::last_os_error()
    }
}

/// The usual limits where none is given, and none above those in force, which only root may raise.
fn all_limits(given: Vec<(Resource, u64)>) -> io::Result<Vec<(Resource, u64)>> {
    let usual = [(Resource::RLIMIT_CORE, 0), (Resource::RLIMIT_FSIZE, 0), (Resource::RLIMIT_NOFILE, OPEN_FILES)];
    let usual = usual.into_iter().filter(|(resource, _)| given.iter().all(|(other, _)| other != resource));
    let all = usual.chain(given.iter().copied());
    all.map(|(resource, most)| Ok((resource, most.min(getrlimit(resource)?.1)))).collect()
}

/// The user that the program becomes does not own its file.
fn open_for_everybody(program: &Path) -> io::Result<OwnedFd> {
    const READ_AND_EXECUTE: u32 = 0o005;
    let file = File::open(program)?;
    let mode = file.metadata()?.permissions().mode();
    if mode & READ_AND_EXECUTE != READ_AND_EXECUTE && nix::unistd::geteuid().is_root() {
        file.set_permissions(Permissions::from_mode(mode | READ_AND_EXECUTE))?;
    }
    Ok(file.into())
}

#[expect(unsafe_code, reason = "the usual end would run what others registered")]
fn end(code: i32) -> ! {
    // SAFETY: it ends the process and runs no handlers.
    unsafe { libc::_exit(code) }
}

/// Whether it could all be written. Allocates nothing.
pub fn write_to(path: &CStr, text: &[u8]) -> bool {
    open(path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty()).is_ok_and(|file| write(file, text) == Ok(text.len()))
}

/// A page of zeros at an address that nobody can guess.
struct SecretPage(usize);

const PAGE: usize = 4096;

impl SecretPage {
    #[expect(unsafe_code, reason = "a page is mapped")]
    fn new() -> io::Result<Self> {
        let mut secret = [0; 8];
        File::open("/dev/urandom")?.read_exact(&mut secret)?;
        // Anywhere in the first 64 TiB, which every 64-bit system gives to programs; taken places give another one.
        let hint = usize::from_le_bytes(secret) & ((1 << 46) - 1) & !(PAGE - 1);
        let (kind, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        // SAFETY: without MAP_FIXED nothing that is mapped is touched.
        let page = unsafe { libc::mmap(hint as *mut libc::c_void, PAGE, libc::PROT_READ, kind, none, 0) };
        if page == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(page as usize)) }
    }

    fn address(&self) -> *const c_char {
        self.0 as *const c_char
    }
}

impl Drop for SecretPage {
    #[expect(unsafe_code, reason = "a page is unmapped")]
    fn drop(&mut self) {
        // SAFETY: it is this page, which nobody else has.
        unsafe { libc::munmap(self.0 as *mut libc::c_void, PAGE) };
    }
}
