// Threads of a block as fibers of one process thread.
//
// A fiber is a stack and a loop that runs threads to their end. A thread that never waits costs no switch: the loop takes
// the next one. A thread that waits keeps the fiber, and another fiber takes over. Which thread runs next is drawn from the
// seed each time; so is the order of the blocks.
//
// A warp's operation is done once every lane of its mask that is alive has come to it; a barrier once every living
// thread has. If no thread can run and some are left, they are in a deadlock.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

// Together in a section, so that the race detector can tell them from a candidate's variables.
#define INDEX __attribute__((section("cuda_cpu_indices")))
INDEX uint3 threadIdx, blockIdx, blockDim, gridDim;

#ifdef CUDA_CPU_ASAN
extern "C" void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
#endif

namespace runtime {
namespace {

constexpr unsigned most_threads = 1024, lanes = 32;
constexpr size_t stack_bytes = 512 * 1024, guard_bytes = 64 * 1024;

struct Fiber {
    void* stack_pointer;
    char* bottom;
    size_t bytes;
    void* fake_stack;
    unsigned next_thread;  // what to run when it is switched to without a thread of its own
#if !defined(__x86_64__) && !defined(__aarch64__)
    ucontext_t context;
#endif
};

enum class Wait : unsigned char { Nothing, Barrier, Warp };

struct Thread {
    Wait wait;
    int operation;
    unsigned mask, argument, width;
    uint64_t value, result;
    const void* caller;
};

struct Warp { unsigned live, waiting; };

Fiber main_fiber, fibers[most_threads + 1];
unsigned fibers_made;
Fiber* idle[most_threads + 1];
unsigned idle_count;
Fiber* running = &main_fiber;

Thread threads[most_threads];
Fiber* fiber_of[most_threads];  // null until a thread has waited
uint3 index_of[most_threads];
unsigned identity[most_threads];
Warp warps[most_threads / lanes];
unsigned ready[most_threads], ready_count;
unsigned waiters[most_threads], arrived, votes;
int barrier_votes, barrier_size;
unsigned thread_count, alive, current;

// What a thread's last atomic operation that changed nothing was about.
struct Asked {
    const void* place;
    unsigned char seen[16];
    unsigned times;
};
Asked asked[most_threads];
unsigned atomic_bytes;
unsigned turns, turns_before;  // how often a turn was given away since a thread did something else than ask

void (*body)(void*);
void* body_data;
uint64_t block_total, blocks_begun, block_number, block_stride;
bool active;
uint64_t state = 1;

#if defined(__x86_64__)
extern "C" void cuda_cpu_switch(void** from, void* to);
asm(R"(
.text
.globl cuda_cpu_switch
.type cuda_cpu_switch, @function
cuda_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cuda_cpu_switch, .-cuda_cpu_switch
)");
constexpr unsigned saved_words = 8, entry_word = 6;
#elif defined(__aarch64__)
extern "C" void cuda_cpu_switch(void** from, void* to);
asm(R"(
.text
.globl cuda_cpu_switch
.type cuda_cpu_switch, %function
cuda_cpu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuda_cpu_switch, .-cuda_cpu_switch
)");
constexpr unsigned saved_words = 20, entry_word = 11;
#endif

void fiber_loop();

void enter_fiber() {
#ifdef CUDA_CPU_ASAN
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!main_fiber.bottom) main_fiber.bottom = (char*)bottom, main_fiber.bytes = bytes;
#endif
    fiber_loop();
}

void prepare(Fiber& fiber) {
    char* memory = (char*)mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fault(Kind::Crash, {}, "no memory for the stacks of threads");
    mprotect(memory, guard_bytes, PROT_NONE);
    fiber.bottom = memory + guard_bytes;
    fiber.bytes = stack_bytes;
#if defined(__x86_64__) || defined(__aarch64__)
    void** top = (void**)(fiber.bottom + stack_bytes) - saved_words;
    memset(top, 0, saved_words * sizeof(void*));
    top[entry_word] = (void*)enter_fiber;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.bottom;
    fiber.context.uc_stack.ss_size = stack_bytes;
    makecontext(&fiber.context, enter_fiber, 0);
#endif
}

void switch_to(Fiber* to) {
    Fiber* from = running;
    running = to;
#ifdef CUDA_CPU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->bytes);
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    cuda_cpu_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->context, &to->context);
#endif
#ifdef CUDA_CPU_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

Fiber* idle_fiber() {
    if (idle_count) return idle[--idle_count];
    Fiber* fiber = &fibers[fibers_made++];
    prepare(*fiber);
    return fiber;
}

inline unsigned below(unsigned limit) { return (unsigned)((random_bits() >> 32) * limit >> 32); }

inline void make_current(unsigned thread) {
    current = thread;
    threadIdx = index_of[thread];
}

inline void make_ready(unsigned thread) {
    threads[thread].wait = Wait::Nothing;
    ready[ready_count++] = thread;
}

const char* operation_name(int operation) {
    static const char* const names[] = {"__syncwarp", "a vote", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                        "__shfl_xor_sync", "__match_any_sync"};
    if (operation < (int)(sizeof names / sizeof *names)) return names[operation];
    return operation == CUDA_CPU_ACTIVE ? "__activemask" : "__reduce_sync";
}

Text what_it_does(unsigned thread) {
    Text text;
    if (thread >= thread_count) snprintf(text.characters, sizeof text.characters, "does not exist");
    else if (threads[thread].wait == Wait::Barrier) snprintf(text.characters, sizeof text.characters, "waits in __syncthreads");
    else
        snprintf(text.characters, sizeof text.characters, "waits in %s with mask 0x%08x",
                 operation_name(threads[thread].operation), threads[thread].mask);
    return text;
}

// A warp's operation that waits for a lane which waits elsewhere: barriers alone cannot block each other.
[[noreturn]] void report_deadlock() {
    for (unsigned t = 0; t < thread_count; t++) {
        const Thread& thread = threads[t];
        if (thread.wait != Wait::Warp || !(warps[t / lanes].live >> t % lanes & 1)) continue;
        for (unsigned lane = 0; lane < lanes; lane++) {
            unsigned other = t / lanes * lanes + lane;
            if (!(thread.mask & warps[t / lanes].live & 1u << lane)) continue;
            if (threads[other].wait == Wait::Warp && threads[other].mask == thread.mask &&
                threads[other].operation == thread.operation) continue;
            fault(Kind::Deadlock, {thread.caller}, "%s waits in %s with mask 0x%08x for lane %u, which %s",
                  coordinates(index_of[t], blockIdx).characters, operation_name(thread.operation), thread.mask, lane,
                  what_it_does(other).characters);
        }
    }
    fault(Kind::Deadlock, {}, "%u threads of block (%u,%u,%u) wait for threads that never come", alive, blockIdx.x,
          blockIdx.y, blockIdx.z);
}

void release_barrier() {
    barrier_votes = (int)votes, barrier_size = (int)arrived;
    for (unsigned i = 0; i < arrived; i++) make_ready(waiters[i]);
    arrived = votes = 0;
    race_barrier_passed();
}

unsigned source_lane(const Thread& thread, unsigned lane) {
    unsigned width = thread.width ? thread.width : lanes, first = lane / width * width, last = first + width - 1;
    switch (thread.operation) {
        case CUDA_CPU_SHUFFLE: return first + (thread.argument & (width - 1));
        case CUDA_CPU_SHUFFLE_UP: return thread.argument > lane - first ? lane : lane - thread.argument;
        case CUDA_CPU_SHUFFLE_DOWN: return thread.argument > last - lane ? lane : lane + thread.argument;
        // Towards a lower segment a butterfly reads across, towards a higher one it keeps its own value.
        default: return (lane ^ thread.argument) > last ? lane : (lane ^ thread.argument) & (lanes - 1);
    }
}

uint64_t combine(int operation, uint64_t a, uint64_t b) {
    int x = (int)a, y = (int)b;
    unsigned u = (unsigned)a, v = (unsigned)b;
    switch (operation) {
        case CUDA_CPU_REDUCE_ADD: return u + v;
        case CUDA_CPU_REDUCE_MIN: return (unsigned)(x < y ? x : y);
        case CUDA_CPU_REDUCE_MAX: return (unsigned)(x > y ? x : y);
        case CUDA_CPU_REDUCE_UNSIGNED_MIN: return u < v ? u : v;
        case CUDA_CPU_REDUCE_UNSIGNED_MAX: return u > v ? u : v;
        case CUDA_CPU_REDUCE_AND: return u & v;
        case CUDA_CPU_REDUCE_OR: return u | v;
        default: return u ^ v;
    }
}

// What the lanes of `group` get from the operation that they have all come to.
void finish_group(unsigned first_thread, unsigned group, int operation) {
    uint64_t common = 0;
    bool begun = false;
    for (unsigned left = group; left; left &= left - 1) {
        unsigned lane = (unsigned)__builtin_ctz(left);
        const Thread& thread = threads[first_thread + lane];
        if (operation == CUDA_CPU_BALLOT) common |= (thread.value & 1) << lane;
        else if (operation >= CUDA_CPU_REDUCE_ADD) common = begun ? combine(operation, common, thread.value) : thread.value;
        begun = true;
    }
    for (unsigned left = group; left; left &= left - 1) {
        unsigned lane = (unsigned)__builtin_ctz(left);
        Thread& thread = threads[first_thread + lane];
        if (operation >= CUDA_CPU_SHUFFLE && operation <= CUDA_CPU_SHUFFLE_XOR) {
            unsigned source = source_lane(thread, lane);
            thread.result = group >> source & 1 ? threads[first_thread + source].value : random_bits();
        } else if (operation == CUDA_CPU_MATCH) {
            thread.result = 0;
            for (unsigned other = 0; other < lanes; other++)
                if (group >> other & 1 && threads[first_thread + other].value == thread.value) thread.result |= 1u << other;
        } else {
            thread.result = common;
        }
    }
}

void release_group(unsigned warp, unsigned group, int operation) {
    finish_group(warp * lanes, group, operation);
    warps[warp].waiting &= ~group;
    for (unsigned left = group; left; left &= left - 1) make_ready(warp * lanes + (unsigned)__builtin_ctz(left));
    race_warp_met(warp);
}

// Finishes the operation with this mask if every living lane of the mask has come to it.
bool try_group(unsigned warp, int operation, unsigned mask) {
    unsigned wanted = mask & warps[warp].live;
    if (!wanted || (warps[warp].waiting & wanted) != wanted) return false;
    for (unsigned left = wanted; left; left &= left - 1) {
        const Thread& thread = threads[warp * lanes + (unsigned)__builtin_ctz(left)];
        if (thread.operation != operation || thread.mask != mask) return false;
    }
    release_group(warp, wanted, operation);
    return true;
}

// `__activemask` has no mask to wait for: whoever has come to one place when nothing else can run is together.
bool release_active_lanes() {
    for (unsigned warp = 0; warp * lanes < thread_count; warp++) {
        unsigned group = 0;
        const void* caller = nullptr;
        for (unsigned left = warps[warp].waiting; left; left &= left - 1) {
            unsigned lane = (unsigned)__builtin_ctz(left);
            const Thread& thread = threads[warp * lanes + lane];
            if (thread.operation != CUDA_CPU_ACTIVE || (caller && thread.caller != caller)) continue;
            caller = thread.caller;
            group |= 1u << lane;
        }
        if (!group) continue;
        release_group(warp, group, CUDA_CPU_ACTIVE);
        for (unsigned left = group; left; left &= left - 1) threads[warp * lanes + (unsigned)__builtin_ctz(left)].result = group;
        return true;
    }
    return false;
}

unsigned pick() {
    if (!ready_count && !release_active_lanes()) report_deadlock();
    unsigned place = below(ready_count), thread = ready[place];
    ready[place] = ready[--ready_count];
    return thread;
}

void end_of_thread() {
    race_thread_leaves();
    turns = 0;
    Warp& warp = warps[current / lanes];
    alive--;
    warp.live &= ~(1u << current % lanes);
    for (unsigned left = warp.waiting; left; left &= left - 1) {
        const Thread& thread = threads[current / lanes * lanes + (unsigned)__builtin_ctz(left)];
        if (try_group(current / lanes, thread.operation, thread.mask)) break;
    }
    if (arrived && arrived == alive) release_barrier();
}

bool begin_block() {
    if (blocks_begun == block_total) return false;
    blocks_begun++;
    block_number += block_stride;
    if (block_number >= block_total) block_number -= block_total;
    blockIdx = block_coordinates(block_number);
    memset(fiber_of, 0, thread_count * sizeof *fiber_of);
    memcpy(ready, identity, thread_count * sizeof *ready);
    ready_count = alive = thread_count;
    for (unsigned warp = 0; warp * lanes < thread_count; warp++) {
        unsigned left = thread_count - warp * lanes;
        warps[warp] = {left >= lanes ? 0xffffffffu : (1u << left) - 1, 0};
    }
    race_block_begins();
    fill_shared_with_garbage();
    return true;
}

// Runs threads until the one drawn next has a fiber of its own.
void fiber_loop() {
    Fiber* own = running;
    for (;;) {
        unsigned thread = own->next_thread;
        for (;;) {
            make_current(thread);
            body(body_data);
            end_of_thread();
            if (!alive && !begin_block()) break;
            thread = pick();
            if (fiber_of[thread]) break;
        }
        idle[idle_count++] = own;
        if (!alive) {
            switch_to(&main_fiber);
        } else {
            make_current(thread);
            switch_to(fiber_of[thread]);
        }
    }
}

// Lets others run until the current thread is ready again and drawn.
void wait() {
    unsigned own = current;
    race_thread_leaves();
    fiber_of[own] = running;
    unsigned thread = pick();
    if (thread == own) return;
    Fiber* fiber = fiber_of[thread];
    if (!fiber) {
        fiber = idle_fiber();
        fiber->next_thread = thread;
    } else {
        make_current(thread);
    }
    switch_to(fiber);
}

uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

// Blocks come in steps that have no divisor in common with their number, so that each comes once.
void shuffle_blocks() {
    block_number = random_bits() % block_total;
    do block_stride = 1 + random_bits() % block_total;
    while (common_divisor(block_stride, block_total) != 1);
    if (block_stride == block_total) block_stride = 0;
}

void check_limits(const uint3& grid, const uint3& block) {
    uint64_t count = (uint64_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        fault(Kind::Launch, {}, "launch refused: a grid of (%u,%u,%u) blocks; the most is (2147483647,65535,65535), the least 1",
              grid.x, grid.y, grid.z);
    if (!count || block.x > 1024 || block.y > 1024 || block.z > 64 || count > most_threads)
        fault(Kind::Launch, {}, "launch refused: a block of (%u,%u,%u) threads; the most is 1024 in all, and 64 in z", block.x,
              block.y, block.z);
}

}  // namespace

void set_seed(uint64_t seed) { state = seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull; }

uint64_t random_bits() {
    state += 0x9e3779b97f4a7c15ull;
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

bool in_kernel() { return active; }
unsigned current_thread_number() { return current; }
uint3 thread_coordinates(unsigned number) { return index_of[number]; }
uint64_t current_block_number() { return block_number; }

uint3 block_coordinates(uint64_t number) {
    uint64_t row = number / gridDim.x;
    return {(unsigned)(number % gridDim.x), (unsigned)(row % gridDim.y), (unsigned)(row / gridDim.y)};
}

bool inside_guard_of_stack(const void* address) {
    for (unsigned i = 0; i < fibers_made; i++) {
        const char* bottom = fibers[i].bottom;
        if ((const char*)address >= bottom - guard_bytes && (const char*)address < bottom) return true;
    }
    return false;
}

void launch(const uint3& grid, const uint3& block, size_t shared, void (*kernel)(void*), void* data) {
    if (active) fault(Kind::Unsupported, {}, "a kernel that launches a kernel is not supported on the CPU device");
    check_limits(grid, block);
    gridDim = grid, blockDim = block;
    thread_count = block.x * block.y * block.z;
    for (unsigned t = 0; t < thread_count; t++) {
        identity[t] = t;
        index_of[t] = {t % block.x, t / block.x % block.y, t / block.x / block.y};
    }
    body = kernel, body_data = data;
    block_total = (uint64_t)grid.x * grid.y * grid.z, blocks_begun = 0;
    shuffle_blocks();
    begin_launch_memory(shared);
    race_launch_begins(thread_count);
    active = true;
    begin_block();
    Fiber* first = idle_fiber();
    first->next_thread = pick();
    switch_to(first);
    active = false;
    race_launch_ends();
}

}  // namespace runtime

using namespace runtime;

extern "C" int cuda_cpu_barrier(int kind, int predicate) {
    if (!active) fault(Kind::Crash, {CALLER}, "__syncthreads outside a kernel");
    threads[current].wait = Wait::Barrier;
    threads[current].caller = CALLER;
    turns = 0;
    waiters[arrived++] = current;
    votes += (unsigned)predicate;
    if (arrived == alive) release_barrier();
    wait();
    if (kind == CUDA_CPU_BARRIER_AND) return barrier_votes == barrier_size;
    return kind == CUDA_CPU_BARRIER_OR ? barrier_votes != 0 : barrier_votes;
}

extern "C" unsigned long long cuda_cpu_warp(int operation, unsigned mask, unsigned long long value, unsigned argument,
                                            unsigned width) {
    const void* caller = CALLER;
    if (!active) fault(Kind::Crash, {caller}, "%s outside a kernel", operation_name(operation));
    unsigned warp = current / lanes, own = 1u << current % lanes;
    if (operation != CUDA_CPU_ACTIVE && !(mask & own))
        fault(Kind::Deadlock, {caller}, "%s calls %s with mask 0x%08x, which leaves out its own lane %u",
              current_thread().characters, operation_name(operation), mask, current % lanes);
    Thread& thread = threads[current];
    turns = 0;
    thread = {Wait::Warp, operation, mask, argument, width, value, 0, caller};
    warps[warp].waiting |= own;
    if (operation != CUDA_CPU_ACTIVE) try_group(warp, operation, mask);
    wait();
    return thread.result;
}

extern "C" void cuda_cpu_launch(const unsigned* grid, const unsigned* block, unsigned long long shared, void (*kernel)(void*),
                                void* data) {
    show_tensors();
    launch({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, kernel, data);
    hide_tensors();
}

extern "C" void cuda_cpu_fence(int block_only) {
    if (!block_only) race_fence();
}

extern "C" void cuda_cpu_atomic(const volatile void* address, unsigned bytes, void* caller) {
    if (!active) return;
    atomic_bytes = bytes;
    turns_before = turns, turns = 0;
    race_atomic((const void*)address, bytes, (const char*)caller - 1);
}

// A thread that asks for one place again and again may wait for another thread to change it: others of its block get a turn
// now and then. If for a long time no thread does anything but ask and finds what it has found before, then no thread of the
// block changes the place. Another block may, but blocks run one after the other here.
extern "C" void cuda_cpu_atomic_changed_nothing(const volatile void* address, void* caller) {
    constexpr unsigned patience = 1000, most_turns = 30000;
    if (!active) return;
    const void* place = (const void*)address;
    Asked& last = asked[current];
    if (last.place == place && !memcmp(last.seen, place, atomic_bytes)) {
        turns = turns_before;
    } else {
        last.place = place, last.times = 0;
        memcpy(last.seen, place, atomic_bytes);
    }
    if (++last.times < patience) return;
    last.times = 0;
    if (++turns <= most_turns) {
        if (!ready_count) return;
        make_ready(current);
        return wait();
    }
    const void* code = caller ? (const char*)caller - 1 : CALLER;
    if (block_total > 1 && !in_shared_memory(place))
        fault(Kind::Unsupported, {code}, "%s waits for another block to change a place in memory; the CPU device runs one block "
              "after the other", current_thread().characters);
    Location at = locate(place);
    fault(Kind::Deadlock, {code}, "%s waits for %s, which no thread changes", current_thread().characters,
          at.where == Where::Inside ? at.text.characters : "a device variable");
}

extern "C" long cuda_cpu_clock() {
    static long ticks;
    return ticks += 100;
}

extern "C" void cuda_cpu_trap() {
    fault(Kind::Crash, {CALLER}, "%s called __trap", current_thread().characters);
}
