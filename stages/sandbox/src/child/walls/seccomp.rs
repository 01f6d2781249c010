//! The wall around system calls: what is not listed here is refused, and the process told by SIGSYS.
//!
//! The lists are what the loader, AddressSanitizer, the C and C++ libraries and the CPU device's runtime use, and what host
//! code that computes may call. A program can open files to read them (Landlock decides which), and start none: the one
//! `execveat` that is allowed has its path at an address that nobody knows and that is gone when the program begins. A
//! process that guesses wrong is killed.

use std::collections::BTreeMap;
use std::ffi::c_long;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Compare, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

/// Calls that are allowed whatever their arguments.
const ALLOWED: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    libc::SYS_times,
    libc::SYS_uname,
    libc::SYS_write,
    libc::SYS_writev,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getrlimit,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// Calls that libraries make at their start and can do without, each with the error that it gives. What lies where in the
/// file system is none of a candidate's business.
const WITHOUT_EFFECT: &[(i32, &[c_long])] = &[
    (
        libc::ENOENT,
        &[
            libc::SYS_faccessat,
            libc::SYS_faccessat2,
            libc::SYS_readlinkat,
            libc::SYS_statx,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_access,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_lstat,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_readlink,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_stat,
        ],
    ),
    (libc::EPERM, &[libc::SYS_ioctl, libc::SYS_personality, libc::SYS_prctl]),
];

/// Stands for the process's own number, which is known after the fork.
const OWN_PROCESS: u32 = 0x5e1f_0001;

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// The filters, all of which hold: the strictest answer counts.
pub struct Filters {
    programs: Vec<BpfProgram>,
    /// Where [`OWN_PROCESS`] stands: filter and instruction.
    own: Vec<(usize, usize)>,
}

impl Filters {
    /// Filters that let through one `execveat`, of this descriptor and with its path at this address; `None` on a processor
    /// that has none here.
    pub fn with_start(descriptor: u64, path: u64) -> Option<Self> {
        let mut listed: Rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
        listed.extend(allowed_for_some());
        listed.insert(libc::SYS_execveat, Vec::new());
        listed.insert(libc::SYS_newfstatat, Vec::new());
        listed.extend(WITHOUT_EFFECT.iter().flat_map(|(_, calls)| *calls).map(|call| (*call, Vec::new())));
        let mut programs = vec![filter(listed, SeccompAction::Trap, SeccompAction::Allow)?];

        let other_starts = [
            condition(0, Length::Dword, Compare::Ne, descriptor),
            condition(1, Length::Qword, Compare::Ne, path),
            condition(4, Length::Dword, Compare::Ne, libc::AT_EMPTY_PATH as u64),
        ];
        let other_starts = Rules::from([(libc::SYS_execveat, other_starts.map(|one| rule(vec![one])).to_vec())]);
        programs.push(filter(other_starts, SeccompAction::Allow, SeccompAction::KillProcess)?);

        for (error, calls) in WITHOUT_EFFECT {
            let mut calls: Rules = calls.iter().map(|call| (*call, Vec::new())).collect();
            if *error == libc::ENOENT {
                // Of a path, not of a descriptor.
                let of_path = condition(3, Length::Dword, Compare::MaskedEq(libc::AT_EMPTY_PATH as u64), 0);
                calls.insert(libc::SYS_newfstatat, vec![rule(vec![of_path])]);
            }
            programs.push(filter(calls, SeccompAction::Allow, SeccompAction::Errno(error.unsigned_abs()))?);
        }
        let own = programs.iter().enumerate().flat_map(|(filter, program)| {
            let found = program.iter().enumerate().filter(|(_, instruction)| instruction.k == OWN_PROCESS);
            found.map(move |(at, _)| (filter, at))
        });
        let own = own.collect();
        Some(Self { programs, own })
    }

    /// Called in the process itself; allocates nothing.
    pub fn know_own_process(&mut self, process: u32) {
        for (filter, at) in &self.own {
            self.programs[*filter][*at].k = process;
        }
    }

    /// Puts the filters up for good around the calling thread; whether all of them stand. Allocates nothing.
    #[expect(unsafe_code, reason = "nothing safe puts up a filter without allocating")]
    pub fn install(&self) -> bool {
        self.programs.iter().all(|program| {
            let program = libc::sock_fprog {
                len: u16::try_from(program.len()).unwrap_or(0),
                // Both crates spell the kernel's type.
                filter: program.as_ptr().cast_mut().cast::<libc::sock_filter>(),
            };
            let address: *const libc::sock_fprog = &program;
            // SAFETY: the kernel copies the filter, which lives until then, and changes nothing.
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, address) == 0 }
        })
    }
}

const _: () = assert!(size_of::<sock_filter>() == size_of::<libc::sock_filter>());

fn filter(rules: Rules, otherwise: SeccompAction, listed: SeccompAction) -> Option<BpfProgram> {
    let processor = TargetArch::try_from(std::env::consts::ARCH).ok()?;
    SeccompFilter::new(rules, otherwise, listed, processor).ok()?.try_into().ok()
}

fn condition(argument: u8, length: Length, compare: Compare, value: u64) -> SeccompCondition {
    SeccompCondition::new(argument, length, compare, value).expect("a system call has six arguments")
}

fn rule(conditions: Vec<SeccompCondition>) -> SeccompRule {
    SeccompRule::new(conditions).expect("there is a condition")
}

/// Calls that are allowed for some arguments.
fn allowed_for_some() -> Rules {
    let one = |argument, compare, value| vec![rule(vec![condition(argument, Length::Dword, compare, value)])];
    // O_TMPFILE holds O_DIRECTORY, but it writes.
    let writes = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64;
    let to_read = |argument| one(argument, Compare::MaskedEq(writes), libc::O_RDONLY as u64);
    let own_process = || one(0, Compare::Eq, u64::from(OWN_PROCESS));
    let about_descriptors = [libc::F_GETFD, libc::F_SETFD, libc::F_GETFL];
    let about_descriptors = about_descriptors.iter().flat_map(|what| one(1, Compare::Eq, what.unsigned_abs().into()));
    // Shared memory without a file would not count as the program's own, so it would have no limit.
    let private_or_file =
        [libc::MAP_SHARED, libc::MAP_ANONYMOUS].map(|flag| Compare::MaskedEq(flag.unsigned_abs().into()));
    let private_or_file = private_or_file.into_iter().flat_map(|flag| one(3, flag, 0));
    Rules::from([
        (libc::SYS_mmap, private_or_file.collect()),
        (libc::SYS_openat, to_read(2)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, to_read(1)),
        (libc::SYS_fcntl, about_descriptors.collect()),
        // A filter more, as the CPU device's runtime puts one up: it can only forbid more.
        (
            libc::SYS_seccomp,
            vec![rule(vec![
                condition(0, Length::Dword, Compare::Eq, libc::SECCOMP_SET_MODE_FILTER.into()),
                condition(1, Length::Dword, Compare::Eq, 0),
            ])],
        ),
        // Limits of its own, which it can only lower.
        (libc::SYS_prlimit64, one(0, Compare::Eq, 0)),
        // abort() and raise().
        (libc::SYS_kill, own_process()),
        (libc::SYS_tgkill, own_process()),
    ])
}
