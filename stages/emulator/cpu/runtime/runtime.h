// What the parts of the runtime know of each other.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../abi.h"

struct uint3 { unsigned x, y, z; };
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace runtime {

// As the evaluator's `FaultKind` spells them.
enum class Kind { Crash, OutOfBounds, Race, Deadlock, Misaligned, Launch, Unsupported };

// The instruction that called, whose line is the candidate's: a return address may lie on the next line.
#define CALLER ((const char*)__builtin_return_address(0) - 1)

// fault.cpp: says what went wrong in one line and ends the process.
struct Place {
    const void* code = nullptr;        // the instruction, for the candidate's line
    unsigned line = 0;                 // the line itself, where known
    const void* other_code = nullptr;  // of a race: where the other access was
};
[[noreturn]] void fault(Kind kind, Place place, const char* format, ...) __attribute__((format(printf, 3, 4)));
void catch_signals();
struct Text { char characters[96]; };
Text coordinates(const uint3& thread, const uint3& block);
Text current_thread();

// memory.cpp: the tensors of a run, and the shared memory of a block.
struct Tensor {
    char name[64];
    unsigned element_bytes;
    char* begin;
    size_t bytes;
};
constexpr unsigned dynamic_limit = 227 * 1024, dynamic_without_opt_in = 48 * 1024;
void name_tensors(const char* names, const unsigned* element_bytes);
unsigned tensor_count();
// Lays the tensors and the scratch buffer (the last) out, each with inaccessible memory around it.
void place_tensors(const size_t* bytes, unsigned count);
Tensor& tensor(unsigned index);
// While a candidate's host function runs, tensors and scratch buffer are out of its reach, as a GPU's memory is.
void hide_tensors();
void show_tensors();
char* region_begin();
size_t region_bytes();
void begin_launch_memory(size_t dynamic_bytes);
void fill_shared_with_garbage();
void for_each_shared_variable(void (*visit)(char* begin, size_t bytes));
// `x[3]`, `shared memory`, `12 bytes past the end of x`.
enum class Where { Inside, Outside, Nowhere };
struct Location { Where where; Text text; };
Location locate(const void* address);
// `8 of them past the end of x`, of an access that begins inside; empty where it ends inside too.
Text overhang(const void* address, size_t bytes);
bool in_shared_memory(const void* address);

// fibers.cpp.
void launch(const uint3& grid, const uint3& block, size_t shared, void (*body)(void*), void* data);
void set_seed(uint64_t seed);
uint64_t random_bits();
bool in_kernel();
unsigned current_thread_number();
uint3 thread_coordinates(unsigned number);
uint3 block_coordinates(uint64_t number);
uint64_t current_block_number();
bool inside_guard_of_stack(const void* address);

// race.cpp; in the memory build these do nothing.
#ifdef CUDA_CPU_RACE
void race_region_placed();
void race_launch_begins(unsigned threads);
void race_launch_ends();
void race_block_begins();
void race_barrier_passed();
void race_warp_met(unsigned warp);
void race_fence();
void race_atomic(const void* address, unsigned bytes, const void* code);
void race_thread_leaves();
#else
inline void race_region_placed() {}
inline void race_launch_begins(unsigned) {}
inline void race_launch_ends() {}
inline void race_block_begins() {}
inline void race_barrier_passed() {}
inline void race_warp_met(unsigned) {}
inline void race_fence() {}
inline void race_atomic(const void*, unsigned, const void*) {}
inline void race_thread_leaves() {}
#endif
}  // namespace runtime
