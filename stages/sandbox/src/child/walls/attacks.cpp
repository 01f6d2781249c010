// What a candidate's machine code could try: one system call or a few for each word. Says `done`, or `errno N` where it is
// refused. A refusal by the walls may also kill it.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static char buffer[4096];

static long opens(const char* path, int flags) {
    long file = syscall(SYS_openat, AT_FDCWD, path, flags, 0600);
    if (file < 0 || (flags & O_ACCMODE) != O_RDONLY || flags & O_DIRECTORY) return file;
    return read((int)file, buffer, sizeof buffer);
}

static long connects(int family, int type, const char* where) {
    int one = (int)syscall(SYS_socket, family, type, 0);
    if (one < 0) return one;
    sockaddr_un local = {AF_UNIX, {}};
    strncpy(local.sun_path, where, sizeof local.sun_path - 1);
    sockaddr_in internet = {AF_INET, htons((uint16_t)atoi(where)), {htonl(INADDR_LOOPBACK)}, {}};
    const sockaddr* to = family == AF_UNIX ? (sockaddr*)&local : (sockaddr*)&internet;
    socklen_t length = family == AF_UNIX ? sizeof local : sizeof internet;
    if (connect(one, to, length)) return -1;
    return write(one, "x", 1);
}

static long forks(long call) {
    // clone's first argument is SIGCHLD: as fork.
    long child = syscall(call, call == SYS_clone ? SIGCHLD : 0, 0, 0, 0, 0);
    if (child == 0) _exit(0);
    return child;
}

static void* nothing(void*) { return nullptr; }

static long starts(const char* program) {
    char* const words[] = {(char*)program, nullptr};
    return syscall(SYS_execve, program, words, nullptr);
}

static long starts_from_memory(const char* program) {
    int from = open(program, O_RDONLY);
    int memory = (int)syscall(SYS_memfd_create, "x", 0);
    if (memory < 0) return memory;
    for (ssize_t count; (count = read(from, buffer, sizeof buffer)) > 0;)
        if (write(memory, buffer, (size_t)count) < 0) return -1;
    char* const words[] = {(char*)"x", nullptr};
    return syscall(SYS_execveat, memory, "", words, nullptr, AT_EMPTY_PATH);
}

static long starts_itself() {
    char* const words[] = {(char*)"attacks", (char*)"nothing", nullptr};
    return syscall(SYS_execveat, AT_FDCWD, "/proc/self/exe", words, nullptr, 0);
}

static long reads_memory_of(pid_t process) {
    iovec here = {buffer, 8}, there = {(void*)buffer, 8};
    return syscall(SYS_process_vm_readv, process, &here, 1, &there, 1, 0);
}

static long queues(pid_t process) {
    siginfo_t info = {};
    info.si_code = SI_QUEUE;
    return syscall(SYS_rt_sigqueueinfo, process, SIGUSR1, &info);
}

// How many descriptors are open, but for those that can only be named (O_PATH).
static long counts_descriptors() {
    long open = 0;
    for (int descriptor = 0; descriptor < 100000; descriptor++) {
        int flags = fcntl(descriptor, F_GETFL);
        open += flags >= 0 && !(flags & O_PATH);
    }
    return open;
}

static long raises_a_limit() {
    rlimit more = {1 << 20, 1 << 20};
    return setrlimit(RLIMIT_FSIZE, &more);
}

#ifdef __x86_64__
// getpid of another way to call: by the numbers of 32 bits, and of 64 bits with 32-bit pointers.
static long of_32_bits() {
    long number = 20;
    asm volatile("int $0x80" : "+a"(number)::"memory");
    return number;
}
static long of_x32() { return syscall(0x40000000 + SYS_getpid); }
#endif

static long waits() {
    puts("ready");
    fflush(stdout);
    return getchar() + 1;
}

static long tries(const char* what, const char* with) {
    auto is = [&](const char* word) { return !strcmp(what, word); };
    int number = atoi(with);
    unsigned long long three[3] = {0, 0, 0};
    if (is("nothing")) return 0;
    if (is("waits")) return waits();
    if (is("reads")) return opens(with, O_RDONLY);
    if (is("lists")) return opens(with, O_RDONLY | O_DIRECTORY);
    if (is("lists entries")) return syscall(SYS_getdents64, 0, buffer, sizeof buffer) < 0 && errno != ENOTDIR ? -1 : 0;
    if (is("looks up")) return syscall(SYS_newfstatat, AT_FDCWD, with, buffer, 0);
    if (is("reads a link")) return syscall(SYS_readlinkat, AT_FDCWD, with, buffer, sizeof buffer);
    if (is("writes")) return opens(with, O_WRONLY);
    if (is("creates")) return opens(with, O_RDONLY | O_CREAT);
    if (is("creates without a name")) return opens(with, O_TMPFILE | O_WRONLY);
    if (is("truncates")) return opens(with, O_RDONLY | O_TRUNC);
    if (is("makes a folder")) return syscall(SYS_mkdirat, AT_FDCWD, with, 0700);
    if (is("links")) return syscall(SYS_symlinkat, "x", AT_FDCWD, with);
    if (is("removes")) return syscall(SYS_unlinkat, AT_FDCWD, with, 0);
    if (is("renames")) return syscall(SYS_renameat2, AT_FDCWD, with, AT_FDCWD, buffer, 0);
    if (is("changes rights")) return syscall(SYS_fchmodat, AT_FDCWD, with, 0777);
    if (is("connects tcp")) return connects(AF_INET, SOCK_STREAM, with);
    if (is("connects udp")) return connects(AF_INET, SOCK_DGRAM, with);
    if (is("connects unix")) return connects(AF_UNIX, SOCK_STREAM, with);
    if (is("pairs sockets")) {
        int both[2];
        return syscall(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, both);
    }
    if (is("clones")) return forks(SYS_clone);
#ifdef __x86_64__
    if (is("forks")) return forks(SYS_fork);
    if (is("calls by 32 bits")) return of_32_bits();
    if (is("calls by x32")) return of_x32();
#endif
    if (is("starts a thread")) {
        pthread_t thread;
        return pthread_create(&thread, nullptr, nothing, nullptr) ? -1 : 0;
    }
    if (is("starts")) return starts(with);
    if (is("starts from memory")) return starts_from_memory(with);
    if (is("starts itself")) return starts_itself();
    if (is("traces")) return syscall(SYS_ptrace, PTRACE_SEIZE, number, 0, 0);
    if (is("reads memory of")) return reads_memory_of(number);
    if (is("signals")) return syscall(SYS_kill, number, SIGUSR1);
    if (is("signals a thread")) return syscall(SYS_tgkill, number, number, SIGUSR1);
    if (is("signals a thread by its number")) return syscall(SYS_tkill, number, SIGUSR1);
    if (is("signals a group")) return syscall(SYS_kill, -number, SIGUSR1);
    if (is("queues a signal")) return queues(number);
    if (is("opens a process")) return syscall(SYS_pidfd_open, number, 0);
    if (is("sets limits of")) return syscall(SYS_prlimit64, number, RLIMIT_CORE, three, nullptr);
    if (is("begins a session")) return syscall(SYS_setsid) < 0 && errno != EPERM ? -1 : 0;
    if (is("leaves its group")) return syscall(SYS_setpgid, 0, 0);
    if (is("mounts")) return syscall(SYS_mount, "none", with, "tmpfs", 0, 0);
    if (is("changes root")) return syscall(SYS_chroot, "/");
    if (is("leaves namespaces")) return syscall(SYS_unshare, CLONE_NEWUTS);
    if (is("becomes root")) return syscall(SYS_setresuid, 0, 0, 0);
    if (is("makes shared memory")) return syscall(SYS_shmget, 0, 4096, 0600 | 01000);
    if (is("shares memory"))
        return syscall(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) == -1 ? -1 : 0;
    if (is("makes a memory file")) return syscall(SYS_memfd_create, "x", 0);
    if (is("sets up io_uring")) return syscall(SYS_io_uring_setup, 1, memset(buffer, 0, sizeof buffer));
    if (is("loads bpf")) return syscall(SYS_bpf, 0, memset(buffer, 0, sizeof buffer), 128) < 0 && errno != EINVAL ? -1 : 0;
    if (is("keeps a key")) return syscall(SYS_keyctl, 0, -3, 0);
    if (is("outlives its parent")) return prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
    if (is("raises a limit")) return raises_a_limit();
    if (is("asks its terminal")) return ioctl(number, FIONREAD, buffer);
    if (is("counts descriptors")) return printf("%ld\n", counts_descriptors()) - 1;
    if (is("counts its environment")) {
        long count = 0;
        for (char** one = environ; *one; one++) count++;
        return printf("%ld\n", count) - 1;
    }
    if (is("aborts")) abort();
    errno = 9999;
    return -1;
}

int main(int count, char** words) {
    long result = tries(words[1], count > 2 ? words[2] : "");
    if (result < 0) printf("errno %d\n", errno);
    else printf("done\n");
    return 0;
}
