// The last wall, put up by the program itself when everything is loaded and nothing of the candidate's has run: no memory
// becomes executable any more, so that no instructions come in as data, and no file is opened.
//
// The walls that the evaluator puts up (child/walls.rs) have to let the loader and AddressSanitizer do both. The functions
// named in `.preinit_array` run before every constructor; a candidate can have none there, since it can name no section.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)offsetof(seccomp_data, field))
#define ANSWER(action) BPF_STMT(BPF_RET | BPF_K, action)
// Goes on with the next but one unless the number is this.
#define CALL(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)(number), 0, 1)

// The kernels that this runs on have the lower half of an argument first.
void seal(int, char**, char**) {
    static sock_filter filter[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JA, 4, 0, 0),
        LOAD(args[2]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1),
        ANSWER(SECCOMP_RET_TRAP),
        ANSWER(SECCOMP_RET_ALLOW),
        CALL(SYS_seccomp),
        ANSWER(SECCOMP_RET_TRAP),
        CALL(SYS_openat),
        ANSWER(SECCOMP_RET_ERRNO | EACCES),
#ifdef SYS_open
        CALL(SYS_open),
        ANSWER(SECCOMP_RET_ERRNO | EACCES),
#endif
        ANSWER(SECCOMP_RET_ALLOW),
    };
    static sock_fprog program = {sizeof filter / sizeof *filter, filter};
    // A system without filters goes on without.
    syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

__attribute__((section(".preinit_array"), used)) void (*const sealed)(int, char**, char**) = seal;

}  // namespace
