"""Putting a process behind walls that it can't take down: namespaces, users, capabilities, resource limits.

Everything here is a thin layer over Linux calls through ctypes, so that the program needs no compiler and no package.

What holds when `enter_namespaces` succeeds (root with CAP_SYS_ADMIN, or a user who may make user namespaces):

- a PID namespace: a child that calls fork, setsid or catches signals dies with the namespace's first process, and
  can see no process outside;
- a mount namespace in which every file system is read-only but for a scratch tmpfs of limited size;
- a network and an IPC namespace of its own, with nothing in them.

Where the program runs as root, a task runs as a user of its own who owns no file: root is exempt from the limit on the
number of processes, and a fork bomb outruns any supervisor. That user keeps one capability, to read files (an
environment below /root is common), and none that writes, mounts or raises a limit.

What holds without them: resource limits, no new privileges, and a supervisor that kills all descendants. A task could
then write to the user's files; `ops/measure` says so in its log.
"""

import ctypes
import os
import resource

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2
LAST_POSSIBLE_CAPABILITY = 63
FIRST_TASK_USER = 1_000_000_000

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapabilityData(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, argument: int, what: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), what)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that made it ends."""
    _prctl(PR_SET_PDEATHSIG, 9, "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died, so that none escapes its sight."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, "prctl(PR_SET_CHILD_SUBREAPER)")


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may look into this one through ptrace and /proc."""
    _prctl(PR_SET_DUMPABLE, int(dumpable), "prctl(PR_SET_DUMPABLE)")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode()),
        f"mount {kind} on {target}",
    )


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def _unshare_as_user() -> None:
    """Namespaces for someone who is not root: a user namespace gives the right to make the others."""
    user, group = os.geteuid(), os.getegid()
    _unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _make_read_only(path: str) -> None:
    attributes = _MountAttributes(attr_set=MOUNT_ATTR_RDONLY)
    _check(
        _libc.syscall(
            SYS_MOUNT_SETATTR,
            AT_FDCWD,
            path.encode(),
            AT_RECURSIVE,
            ctypes.byref(attributes),
            ctypes.sizeof(attributes),
        ),
        f"mount_setattr on {path}",
    )


def enter_namespaces() -> bool:
    """Make new namespaces for the children of this process; False where the system does not allow it."""
    try:
        _unshare(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC)
        return True
    except OSError:
        pass
    try:
        _unshare_as_user()
        return True
    except OSError:
        return False


def wall_off_file_system(scratch: str, scratch_bytes: int, owner: int | None) -> None:
    """In a new mount namespace: everything read-only, `scratch` a fresh tmpfs of limited size, /proc of this
    namespace alone. Raises OSError where the kernel can't."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _make_read_only("/")
    # CUDA names its threads through /proc, so that it can't be read-only as a whole; what root could do harm with is.
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path in filter(os.path.exists, ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")):
        _mount(path, path, "", MS_BIND | MS_REC)
        _make_read_only(path)
    _mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_bytes},mode=0700")
    if owner is not None:
        os.chown(scratch, owner, owner)
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_bytes},mode=1777")


def _set_capabilities(kept: int) -> None:
    """Hold exactly the capabilities of the bit set `kept` (all below 32), inheritable ones included."""
    header = _CapabilityHeader(version=CAPABILITY_VERSION_3, pid=0)
    data = (_CapabilityData * 2)(_CapabilityData(kept, kept, kept), _CapabilityData(0, 0, 0))
    _check(_libc.capset(ctypes.byref(header), data), "capset")


def _forbid_new_privileges(kept: int | None) -> None:
    """Take every capability but the kept one out of reach, also of programs started from here."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")
    for capability in range(LAST_POSSIBLE_CAPABILITY + 1):
        if capability != kept:
            # EINVAL: the kernel has no such capability; EPERM: there was nothing to drop it with.
            _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)


def drop_privileges() -> None:
    """Give up every capability for good."""
    _forbid_new_privileges(kept=None)
    _set_capabilities(0)


def task_user(number: int) -> int | None:
    """The user for a task, if this process may become another one. Distinct numbers give distinct users, so that two
    programs side by side don't share a limit."""
    return FIRST_TASK_USER + number if os.geteuid() == 0 else None


def become(user: int) -> bool:
    """Become a user who owns nothing and may only read; False where the system has no such user (a container's root
    often has a few thousand), after which the process has no capability but is still root."""
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        _forbid_new_privileges(kept=CAP_DAC_READ_SEARCH)
        _prctl(PR_SET_KEEPCAPS, 1, "prctl(PR_SET_KEEPCAPS)")
        os.setresuid(user, user, user)
        _set_capabilities(1 << CAP_DAC_READ_SEARCH)
        _check(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0), "prctl(PR_CAP_AMBIENT)")
        return True
    except OSError:
        drop_privileges()
        return False


def offer_to_memory_killer() -> None:
    """When the machine runs out of memory, this process and its children are to go first."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _lower(limit: int, value: int) -> None:
    """Set a soft and hard limit, never above the hard one in force."""
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def limit_resources(*, data_bytes: int | None, file_bytes: int, cpu_seconds: int, processes: int) -> None:
    """Hard limits of one process; the supervisor watches the sum over all of them. `data_bytes` is what the process
    may add to its present data segment, or None for no limit (a CUDA context maps more than any machine has).
    `processes` counts the threads of the user, wherever they run."""
    if data_bytes is not None:
        _lower(resource.RLIMIT_DATA, _present_data_bytes() + data_bytes)
    _lower(resource.RLIMIT_FSIZE, file_bytes)
    _lower(resource.RLIMIT_CPU, cpu_seconds)
    _lower(resource.RLIMIT_NPROC, processes)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, 1024)


def _present_data_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 0
