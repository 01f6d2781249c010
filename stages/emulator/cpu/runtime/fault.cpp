// The end of a run that went wrong: one line on standard error, `cuda-cpu: {…}`, and exit code 86.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <initializer_list>

#include "runtime.h"

namespace runtime {
namespace {

constexpr int exit_code = 86;

const char* spelled(Kind kind) {
    switch (kind) {
        case Kind::OutOfBounds: return "out_of_bounds";
        case Kind::Race: return "race";
        case Kind::Deadlock: return "deadlock";
        case Kind::Misaligned: return "misaligned";
        case Kind::Launch: return "launch";
        case Kind::Unsupported: return "unsupported";
        default: return "crash";
    }
}

size_t escape(char* to, const char* from) {
    char* begin = to;
    for (; *from; from++) {
        if (*from == '"' || *from == '\\') *to++ = '\\';
        *to++ = (unsigned char)*from < ' ' ? ' ' : *from;
    }
    *to = 0;
    return (size_t)(to - begin);
}

void write_all(const char* text, size_t bytes) {
    while (bytes) {
        ssize_t written = write(2, text, bytes);
        if (written <= 0) return;
        text += written, bytes -= (size_t)written;
    }
}

const void* code_of(void* context) {
#if defined(__x86_64__)
    return (const void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (const void*)((ucontext_t*)context)->uc_mcontext.pc;
#else
    return nullptr;
#endif
}

const char* verb(void* context) {
#if defined(__x86_64__)
    return ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2 ? "writes" : "reads";
#else
    return "touches";
#endif
}

[[noreturn]] void bad_address(const void* address, const void* code, const char* action) {
    Text who = current_thread();
    if (inside_guard_of_stack(address))
        fault(Kind::Crash, {code}, "%s needs more than 512 KiB of stack", who.characters);
    Location at = locate(address);
    if (at.where == Where::Inside && !in_kernel())
        fault(Kind::Crash, {code}, "%s %s %s, which is memory of the device", who.characters, action, at.text.characters);
    if (at.where != Where::Nowhere)
        fault(Kind::OutOfBounds, {code}, "%s %s %s", who.characters, action, at.text.characters);
    if ((uintptr_t)address < 65536)
        fault(Kind::OutOfBounds, {code}, "%s %s address %p: a null pointer", who.characters, action, address);
    fault(Kind::OutOfBounds, {code}, "%s %s address %p, where nothing is", who.characters, action, address);
}

// Those that have the same name everywhere, and that somebody would try.
Text named_call(int number) {
    static const struct { int number; const char* name; } calls[] = {
#define CALL(name) {SYS_##name, #name}
        CALL(accept4), CALL(bind), CALL(bpf), CALL(chdir), CALL(chroot), CALL(clone), CALL(clone3), CALL(connect),
        CALL(execve), CALL(execveat), CALL(fchmod), CALL(fcntl), CALL(ftruncate), CALL(getcwd), CALL(getdents64),
        CALL(getppid), CALL(io_uring_setup), CALL(kill), CALL(memfd_create), CALL(mkdirat), CALL(mmap), CALL(mount),
        CALL(mprotect), CALL(openat),
        CALL(openat2), CALL(perf_event_open), CALL(pidfd_open), CALL(ppoll), CALL(process_vm_readv), CALL(process_vm_writev),
        CALL(ptrace), CALL(renameat2), CALL(seccomp), CALL(sendmsg), CALL(sendto), CALL(setns), CALL(setpgid), CALL(setresuid),
        CALL(setrlimit), CALL(setsid), CALL(setuid), CALL(shmget), CALL(socket), CALL(socketpair), CALL(symlinkat), CALL(tgkill),
        CALL(tkill), CALL(truncate), CALL(umount2), CALL(unlinkat), CALL(unshare), CALL(userfaultfd), CALL(utimensat),
#ifdef __x86_64__
        CALL(chmod), CALL(creat), CALL(fork), CALL(link), CALL(mkdir), CALL(open), CALL(poll), CALL(rename), CALL(symlink),
        CALL(unlink), CALL(vfork),
#endif
#undef CALL
    };
    Text text;
    snprintf(text.characters, sizeof text.characters, "%d", number);
    for (auto& call : calls)
        if (call.number == number) snprintf(text.characters, sizeof text.characters, "%s", call.name);
    return text;
}

void on_signal(int signal, siginfo_t* info, void* context) {
    const void* code = code_of(context);
    if (signal == SIGSEGV || signal == SIGBUS) {
        if (info->si_code <= 0 || info->si_code == SI_KERNEL)
            fault(Kind::OutOfBounds, {code}, "%s uses an address that cannot exist", current_thread().characters);
        bad_address(info->si_addr, code, verb(context));
    }
    if (signal == SIGFPE) fault(Kind::Crash, {code}, "%s divides an integer by zero", current_thread().characters);
    if (signal == SIGILL) fault(Kind::Crash, {code}, "%s executes what is no instruction", current_thread().characters);
    if (signal == SIGSYS)
        fault(Kind::Crash, {code}, "%s makes the system call %s, which is refused", current_thread().characters,
              named_call(info->si_syscall).characters);
    fault(Kind::Crash, {code}, "%s ends the process by a signal (%d)", current_thread().characters, signal);
}

}  // namespace

Text coordinates(const uint3& t, const uint3& b) {
    Text text;
    snprintf(text.characters, sizeof text.characters, "thread (%u,%u,%u) of block (%u,%u,%u)", t.x, t.y, t.z, b.x, b.y, b.z);
    return text;
}

Text current_thread() {
    if (in_kernel()) return coordinates(threadIdx, blockIdx);
    Text text;
    snprintf(text.characters, sizeof text.characters, "the host function");
    return text;
}

void fault(Kind kind, Place place, const char* format, ...) {
    char message[512], escaped[1024], line[1400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    escape(escaped, message);
    int bytes = snprintf(line, sizeof line, "\ncuda-cpu: {\"kind\":\"%s\",\"message\":\"%s\",\"line\":%u,\"code\":%llu,\"other_code\":%llu}\n",
                         spelled(kind), escaped, place.line, (unsigned long long)(uintptr_t)place.code,
                         (unsigned long long)(uintptr_t)place.other_code);
    write_all(line, (size_t)bytes);
    _exit(exit_code);
}

void catch_signals() {
    static char stack[64 * 1024];
    stack_t alternative = {};
    alternative.ss_sp = stack, alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
    for (int signal : std::initializer_list<int>{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS}) sigaction(signal, &action, nullptr);
}

}  // namespace runtime

using namespace runtime;

extern "C" [[noreturn]] void __assert_fail(const char* text, const char*, unsigned line, const char*) noexcept {
    fault(Kind::Crash, {nullptr, line}, "%s fails the assertion `%s`", current_thread().characters, text);
}

#ifdef CUDA_CPU_ASAN
extern "C" void* __asan_get_report_address();
extern "C" void* __asan_get_report_pc();
extern "C" int __asan_get_report_access_type();
extern "C" size_t __asan_get_report_access_size();
extern "C" const char* __asan_get_report_description();

extern "C" const char* __asan_default_options() {
    return "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0:handle_sigill=0:"
           "handle_abort=0:use_sigaltstack=0:allocator_may_return_null=1:exitcode=99:abort_on_error=0:print_summary=0:"
           "symbolize=0:check_initialization_order=0:detect_odr_violation=0:intercept_tls_get_addr=0";
}

static const char* what_asan_calls(const char* bug) {
    if (!strncmp(bug, "stack", 5) || !strncmp(bug, "dynamic-stack", 13)) return "outside every local variable";
    if (!strncmp(bug, "global", 6)) return "outside every variable of the program";
    if (!strncmp(bug, "heap", 4)) return "outside every block of the heap";
    return bug;
}

// AddressSanitizer calls this when it has found something and before it prints it.
extern "C" void __asan_on_error() {
    void* address = __asan_get_report_address();
    const void* code = (const char*)__asan_get_report_pc() - 1;
    if (!address) return;
    char action[48];
    size_t bytes = __asan_get_report_access_size();
    snprintf(action, sizeof action, "%s %zu bytes:", __asan_get_report_access_type() ? "writes" : "reads", bytes);
    if (locate(address).where == Where::Outside) bad_address(address, code, action);
    Text past = overhang(address, bytes);
    if (*past.characters) fault(Kind::OutOfBounds, {code}, "%s %s %s", current_thread().characters, action, past.characters);
    fault(Kind::OutOfBounds, {code}, "%s %s %s", current_thread().characters, action, what_asan_calls(__asan_get_report_description()));
}

// The alignment check of UndefinedBehaviorSanitizer, without its library.
struct SourceLocation { const char* file; unsigned line, column; };
struct TypeDescriptor { unsigned short kind, info; char name[1]; };
struct TypeMismatch { SourceLocation location; const TypeDescriptor* type; unsigned char alignment; unsigned char check; };

extern "C" void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t address) {
    static const char* const checks[] = {"reads", "writes", "binds a reference to"};
    size_t alignment = (size_t)1 << data->alignment;
    const char* action = data->check < 3 ? checks[data->check] : "uses";
    if (address == 0) bad_address(nullptr, CALLER, action);
    Location at = locate((const void*)address);
    fault(Kind::Misaligned, {CALLER, 0}, "%s %s a %s at %s, which is %zu bytes off a multiple of %zu",
          current_thread().characters, action, data->type->name, at.where == Where::Nowhere ? "an address" : at.text.characters,
          (size_t)(address % alignment), alignment);
}
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
    __ubsan_handle_type_mismatch_v1_abort(data, address);
}
#endif
