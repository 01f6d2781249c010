// Preloaded into a part of nvcc: it reads the text that all sources begin with once, and goes on with each source in a
// process of its own, forked where that text ends.
//
// GOES_ON names the file. When its end is reached, each line on standard input is a folder: a child changes to it, reads
// on in the file of the same name there, and ends as the program ends. Its status is answered as a line.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static const char* name;
static int file = -1;
static int is_child;

// Reads a folder; without one, the program is no longer needed.
static void next_folder(char* folder, size_t most) {
    size_t length = 0;
    for (;;) {
        if (length + 1 >= most || read(0, folder + length, 1) != 1) _exit(0);
        if (folder[length] == '\n') break;
        length++;
    }
    folder[length] = 0;
}

static void become_child(const char* folder, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(125);
    is_child = 1;
    int nothing = open("/dev/null", O_RDWR);
    for (int standard = 0; standard < 3; standard++) dup2(nothing, standard);
    close(nothing);
    file = chdir(folder) ? -1 : open(name, O_RDONLY);
    if (file < 0) _exit(125);
}

static ssize_t take(void* cookie, char* to, size_t most) {
    (void)cookie;
    ssize_t count = read(file, to, most);
    if (count != 0 || is_child) return count;
    char folder[4096];
    for (;;) {
        next_folder(folder, sizeof folder);
        pid_t parent = getpid(), child = fork();
        if (child == 0) {
            close(file);
            become_child(folder, parent);
            return read(file, to, most);
        }
        int status = -1;
        while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
        dprintf(1, "%d\n", child > 0 ? status : -1);
    }
}

static int closed(void* cookie) {
    (void)cookie;
    return 0;
}

static FILE* opened(const char* wanted, const char* mode, const char* which) {
    if (!name) name = getenv("GOES_ON");
    if (name && file < 0 && strcmp(wanted, name) == 0 && mode[0] == 'r') {
        file = open(name, O_RDONLY);
        if (file < 0) return NULL;
        cookie_io_functions_t functions = {take, NULL, NULL, closed};
        return fopencookie(NULL, "r", functions);
    }
    FILE* (*real)(const char*, const char*) = (FILE* (*)(const char*, const char*))dlsym(RTLD_NEXT, which);
    return real(wanted, mode);
}

FILE* fopen(const char* wanted, const char* mode) { return opened(wanted, mode, "fopen"); }
FILE* fopen64(const char* wanted, const char* mode) { return opened(wanted, mode, "fopen64"); }
