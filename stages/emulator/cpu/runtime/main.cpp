// The program around a candidate: reads `run` lines, copies tensors out of the shared file, runs the launches, copies back.
//
//     program ARENA_FD ARENA_BYTES IN_FD OUT_FD
//     > ready {"launches": 1}
//     < run SEED OFFSET:BYTES … OFFSET:BYTES        (each tensor in the ABI's order, the scratch buffer last)
//     > done {"ms": 1.5}
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <vector>

#include "runtime.h"

namespace runtime {
namespace {

struct Registered {
    const cuda_cpu_record* record;
    cuda_cpu_call call;
};

std::vector<Registered>& registered() {
    static std::vector<Registered> all;
    return all;
}

struct Argument { size_t offset, bytes; };

char* arena;
size_t arena_bytes;
std::vector<void*> pointers;

[[noreturn]] void refuse(const char* why) {
    fprintf(stderr, "cuda-cpu protocol: %s\n", why);
    _exit(2);
}

double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

void map_arena(int file, const char* bytes) {
    arena_bytes = strtoull(bytes, nullptr, 10);
    void* memory = mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) refuse("cannot map the arena");
    close(file);
    arena = (char*)memory;
}

std::vector<Argument> read_arguments(char* at) {
    std::vector<Argument> arguments;
    while (*at == ' ') {
        size_t offset = strtoull(at, &at, 10);
        if (*at != ':') refuse("an argument is no OFFSET:BYTES");
        size_t bytes = strtoull(at + 1, &at, 10);
        if (offset > arena_bytes || bytes > arena_bytes - offset) refuse("an argument lies outside the arena");
        arguments.push_back({offset, bytes});
    }
    if (arguments.size() != tensor_count() + 1) refuse("the number of arguments is not the task's");
    return arguments;
}

void copy_in(const std::vector<Argument>& arguments) {
    std::vector<size_t> sizes;
    for (const Argument& a : arguments) sizes.push_back(a.bytes);
    place_tensors(sizes.data(), (unsigned)sizes.size());
    pointers.clear();
    for (unsigned i = 0; i < arguments.size(); i++) {
        memcpy(tensor(i).begin, arena + arguments[i].offset, arguments[i].bytes);
        pointers.push_back(tensor(i).begin);
    }
    pointers.push_back(nullptr);
}

void copy_out(const std::vector<Argument>& arguments) {
    for (unsigned i = 0; i < tensor_count(); i++) memcpy(arena + arguments[i].offset, tensor(i).begin, arguments[i].bytes);
}

cuda_cpu_call declared_call;
void call_declared(void*) { declared_call(pointers.data()); }

void run_one(const Registered& launch_of) {
    const cuda_cpu_record* record = launch_of.record;
    if (record) {
        declared_call = launch_of.call;
        if (record->shared > dynamic_without_opt_in) cuda_cpu_opt_in(record->shared);
        launch({record->grid[0], record->grid[1], record->grid[2]}, {record->block[0], record->block[1], record->block[2]},
               record->shared, call_declared, nullptr);
    } else {
        hide_tensors();
        int error = launch_of.call(pointers.data());
        show_tensors();
        if (error) fault(Kind::Launch, {}, "launch returned cudaError_t %d", error);
    }
}

void answer_run(char* line, FILE* out) {
    char* rest;
    set_seed(strtoull(line + strlen("run "), &rest, 10));
    std::vector<Argument> arguments = read_arguments(rest);
    copy_in(arguments);
    double begin = milliseconds();
    for (const Registered& r : registered()) run_one(r);
    double end = milliseconds();
    copy_out(arguments);
    fprintf(out, "done {\"ms\": %.4f}\n", end - begin);
    fflush(out);
}

}  // namespace
}  // namespace runtime

extern "C" void cuda_cpu_register(const cuda_cpu_record* record, cuda_cpu_call call, const char* names,
                                  const unsigned* element_bytes) {
    runtime::name_tensors(names, element_bytes);
    runtime::registered().push_back({record, call});
}

int main(int count, char** words) {
    using namespace runtime;
    if (count != 5) refuse("usage: program ARENA_FD ARENA_BYTES IN_FD OUT_FD");
    map_arena(atoi(words[1]), words[2]);
    FILE* in = fdopen(atoi(words[3]), "r");
    FILE* out = fdopen(atoi(words[4]), "w");
    if (!in || !out) refuse("no pipes");
    catch_signals();
    fprintf(out, "ready {\"launches\": %zu}\n", registered().size());
    fflush(out);
    char* line = nullptr;
    size_t room = 0;
    while (getline(&line, &room, in) > 0) {
        if (strncmp(line, "run ", 4)) refuse("not a run line");
        answer_run(line, out);
    }
    return 0;
}
