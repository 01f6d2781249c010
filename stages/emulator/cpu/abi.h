// What a candidate's translation unit and the runtime know of each other. C names only, so that both may be built with
// different instrumentation.
#pragma once

enum cuda_cpu_warp_operation {
    CUDA_CPU_SYNC,
    CUDA_CPU_BALLOT,
    CUDA_CPU_SHUFFLE,
    CUDA_CPU_SHUFFLE_UP,
    CUDA_CPU_SHUFFLE_DOWN,
    CUDA_CPU_SHUFFLE_XOR,
    CUDA_CPU_MATCH,
    CUDA_CPU_REDUCE_ADD,
    CUDA_CPU_REDUCE_MIN,
    CUDA_CPU_REDUCE_MAX,
    CUDA_CPU_REDUCE_UNSIGNED_MIN,
    CUDA_CPU_REDUCE_UNSIGNED_MAX,
    CUDA_CPU_REDUCE_AND,
    CUDA_CPU_REDUCE_OR,
    CUDA_CPU_REDUCE_XOR,
    CUDA_CPU_ACTIVE,
};

enum cuda_cpu_barrier_kind { CUDA_CPU_BARRIER, CUDA_CPU_BARRIER_COUNT, CUDA_CPU_BARRIER_AND, CUDA_CPU_BARRIER_OR };

// One launch of a `kernel` candidate, as the compile step reads it out of the section `cuda_cpu_launches`.
struct cuda_cpu_record {
    char kernel[64];
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    unsigned arguments;
    unsigned order;  // the compiler may lay records out in another order than the source's
    unsigned unused;
};

// Runs a declared kernel for the current thread, or the candidate's host function: `pointers` are the task's tensors, then
// the scratch buffer and the (null) stream. What it returns is the host function's `cudaError_t`.
typedef int (*cuda_cpu_call)(void* const* pointers);

extern "C" {
// Registration, before main; the host function of a `launch` candidate has no record. `names` are the task's tensors as
// written, separated by commas; `element_bytes` has one entry for each.
void cuda_cpu_register(const cuda_cpu_record* record, cuda_cpu_call call, const char* names, const unsigned* element_bytes);
void cuda_cpu_register_shared(void* begin, unsigned long long bytes, unsigned red_zone);

// Launching from the candidate's host code: `body(data)` once for each thread.
void cuda_cpu_launch(const unsigned* grid, const unsigned* block, unsigned long long shared, void (*body)(void*), void* data);
void cuda_cpu_opt_in(long long shared_bytes);

// Copies and fills as the host code asks for them, which cannot itself reach the tensors.
void cuda_cpu_copy(void* to, const void* from, unsigned long long bytes);
void cuda_cpu_fill(void* to, int value, unsigned long long bytes);

// Called by threads of a block. `caller` is where the candidate called an atomic operation, null where that was inlined.
int cuda_cpu_barrier(int kind, int predicate);
unsigned long long cuda_cpu_warp(int operation, unsigned mask, unsigned long long value, unsigned argument, unsigned width);
void cuda_cpu_fence(int block_only);
void cuda_cpu_atomic(const volatile void* address, unsigned bytes, void* caller);
void cuda_cpu_atomic_changed_nothing(const volatile void* address, void* caller);
long cuda_cpu_clock();
[[noreturn]] void cuda_cpu_trap();

extern unsigned char cuda_cpu_dynamic_shared[];
}
