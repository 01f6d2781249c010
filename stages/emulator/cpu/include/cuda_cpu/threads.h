// Where a thread is, what it waits for, and what a warp does together.
#pragma once

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;

CUDA_CPU_INLINE void __syncthreads() { cuda_cpu_barrier(CUDA_CPU_BARRIER, 0); }
CUDA_CPU_INLINE int __syncthreads_count(int p) { return cuda_cpu_barrier(CUDA_CPU_BARRIER_COUNT, p != 0); }
CUDA_CPU_INLINE int __syncthreads_and(int p) { return cuda_cpu_barrier(CUDA_CPU_BARRIER_AND, p != 0); }
CUDA_CPU_INLINE int __syncthreads_or(int p) { return cuda_cpu_barrier(CUDA_CPU_BARRIER_OR, p != 0); }
CUDA_CPU_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { cuda_cpu_warp(CUDA_CPU_SYNC, mask, 0, 0, 32); }

CUDA_CPU_INLINE void __threadfence() { cuda_cpu_fence(0); }
CUDA_CPU_INLINE void __threadfence_system() { cuda_cpu_fence(0); }
CUDA_CPU_INLINE void __threadfence_block() { cuda_cpu_fence(1); }

namespace cuda_cpu {
// Any value of at most eight bytes as a warp exchanges it.
template <class T>
CUDA_CPU_INLINE T exchange(int operation, unsigned mask, T value, unsigned argument, unsigned width) {
    static_assert(sizeof(T) <= 8, "a warp exchanges values of at most eight bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = cuda_cpu_warp(operation, mask, bits, argument, width);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
}  // namespace cuda_cpu

#define CUDA_CPU_SHUFFLES(T)                                                                               \
    CUDA_CPU_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {                      \
        return cuda_cpu::exchange(CUDA_CPU_SHUFFLE, mask, value, (unsigned)lane, (unsigned)width);         \
    }                                                                                                      \
    CUDA_CPU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {             \
        return cuda_cpu::exchange(CUDA_CPU_SHUFFLE_UP, mask, value, delta, (unsigned)width);               \
    }                                                                                                      \
    CUDA_CPU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {           \
        return cuda_cpu::exchange(CUDA_CPU_SHUFFLE_DOWN, mask, value, delta, (unsigned)width);             \
    }                                                                                                      \
    CUDA_CPU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {                 \
        return cuda_cpu::exchange(CUDA_CPU_SHUFFLE_XOR, mask, value, (unsigned)lanes, (unsigned)width);    \
    }
CUDA_CPU_SHUFFLES(int)
CUDA_CPU_SHUFFLES(unsigned)
CUDA_CPU_SHUFFLES(long)
CUDA_CPU_SHUFFLES(unsigned long)
CUDA_CPU_SHUFFLES(long long)
CUDA_CPU_SHUFFLES(unsigned long long)
CUDA_CPU_SHUFFLES(float)
CUDA_CPU_SHUFFLES(double)
CUDA_CPU_SHUFFLES(__half)
CUDA_CPU_SHUFFLES(__half2)
CUDA_CPU_SHUFFLES(__nv_bfloat16)
CUDA_CPU_SHUFFLES(__nv_bfloat162)
#undef CUDA_CPU_SHUFFLES

CUDA_CPU_INLINE unsigned __ballot_sync(unsigned mask, int p) {
    return (unsigned)cuda_cpu_warp(CUDA_CPU_BALLOT, mask, p != 0, 0, 32);
}
CUDA_CPU_INLINE int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
CUDA_CPU_INLINE int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
CUDA_CPU_INLINE unsigned __activemask() { return (unsigned)cuda_cpu_warp(CUDA_CPU_ACTIVE, 0, 0, 0, 32); }
template <class T>
CUDA_CPU_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return (unsigned)cuda_cpu_warp(CUDA_CPU_MATCH, mask, bits, 0, 32);
}
template <class T>
CUDA_CPU_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all) {
    unsigned same = __match_any_sync(mask, value), present = __ballot_sync(mask, 1);
    *all = same == present;
    return *all ? same : 0;
}

#define CUDA_CPU_REDUCE(name, T, operation)                                                 \
    CUDA_CPU_INLINE T __reduce_##name##_sync(unsigned mask, T value) {                      \
        return (T)cuda_cpu_warp(operation, mask, (unsigned)value, 0, 32);                   \
    }
CUDA_CPU_REDUCE(add, int, CUDA_CPU_REDUCE_ADD)
CUDA_CPU_REDUCE(add, unsigned, CUDA_CPU_REDUCE_ADD)
CUDA_CPU_REDUCE(min, int, CUDA_CPU_REDUCE_MIN)
CUDA_CPU_REDUCE(min, unsigned, CUDA_CPU_REDUCE_UNSIGNED_MIN)
CUDA_CPU_REDUCE(max, int, CUDA_CPU_REDUCE_MAX)
CUDA_CPU_REDUCE(max, unsigned, CUDA_CPU_REDUCE_UNSIGNED_MAX)
CUDA_CPU_REDUCE(and, unsigned, CUDA_CPU_REDUCE_AND)
CUDA_CPU_REDUCE(or, unsigned, CUDA_CPU_REDUCE_OR)
CUDA_CPU_REDUCE(xor, unsigned, CUDA_CPU_REDUCE_XOR)
#undef CUDA_CPU_REDUCE

// Loads and stores with a cache hint are plain ones.
#define CUDA_CPU_LOAD(name) \
    template <class T>      \
    CUDA_CPU_INLINE T name(const T* address) { return *address; }
CUDA_CPU_LOAD(__ldg)
CUDA_CPU_LOAD(__ldcg)
CUDA_CPU_LOAD(__ldca)
CUDA_CPU_LOAD(__ldcs)
CUDA_CPU_LOAD(__ldlu)
CUDA_CPU_LOAD(__ldcv)
#undef CUDA_CPU_LOAD
#define CUDA_CPU_STORE(name)       \
    template <class T, class V>    \
    CUDA_CPU_INLINE void name(T* address, V value) { *address = value; }
CUDA_CPU_STORE(__stwb)
CUDA_CPU_STORE(__stcg)
CUDA_CPU_STORE(__stcs)
CUDA_CPU_STORE(__stwt)
#undef CUDA_CPU_STORE

// The name and the type of C's, as in CUDA, so that <time.h> and <ctime> may follow; the function is the device's.
typedef long clock_t;
extern "C" clock_t clock() noexcept __asm__("cuda_cpu_clock");
CUDA_CPU_INLINE long long clock64() { return clock(); }
CUDA_CPU_INLINE void __nanosleep(unsigned) {}
[[noreturn]] CUDA_CPU_INLINE void __trap() { cuda_cpu_trap(); }
CUDA_CPU_INLINE void __brkpt() {}
CUDA_CPU_INLINE size_t __cvta_generic_to_shared(const void* address) { return (size_t)address; }
CUDA_CPU_INLINE void __builtin_assume(bool) {}
extern "C" int printf(const char*, ...);

namespace cuda_cpu {
// Dynamic shared memory, as rewrite.rs turns `extern __shared__ T name[];` into.
template <class T>
CUDA_CPU_INLINE T* dynamic() { return reinterpret_cast<T*>(cuda_cpu_dynamic_shared); }

// A variable of static shared memory with red zones around it. `S` has the variables of its declaration as members, so that
// its alignment is the declared one; `number` counts them.
constexpr unsigned red_zone = 256;
template <class S, class T>
struct __attribute__((aligned(256))) Padded {
    static_assert(sizeof(S) <= 48 * 1024, "too much static shared memory: a block has 48 KiB");
    unsigned char before[red_zone];
    alignas(S) T value;
    unsigned char after[red_zone + 256];
    Padded() { cuda_cpu_register_shared((void*)&value, sizeof(T), red_zone); }
};
template <class S, class T, unsigned number>
struct Shared { static inline Padded<S, T> memory; };
}  // namespace cuda_cpu
