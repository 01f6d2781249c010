// Atomic operations. One process thread runs all fibers and switches only where a fiber waits, so that a plain operation is
// atomic; what is said to the runtime is that it was meant as one.
#pragma once

namespace cuda_cpu {
template <class T, class U>
CUDA_CPU_ATOMIC T atomic_update(T* address, U update) {
    cuda_cpu_atomic(address, sizeof(T), CUDA_CPU_CALLER);
    T old = *address, made = update(old);
    *address = made;
    if (!__builtin_memcmp(&old, &made, sizeof(T))) cuda_cpu_atomic_changed_nothing(address, CUDA_CPU_CALLER);
    return old;
}
}  // namespace cuda_cpu

#define CUDA_CPU_ATOMIC_OPERATION(name, T, expression)                                                  \
    CUDA_CPU_INLINE T name(T* address, T value) {                                                       \
        return cuda_cpu::atomic_update(address, [value](T old) -> T { return expression; });            \
    }                                                                                                   \
    CUDA_CPU_INLINE T name##_block(T* address, T value) { return name(address, value); }                \
    CUDA_CPU_INLINE T name##_system(T* address, T value) { return name(address, value); }
#define CUDA_CPU_ATOMIC_INTEGERS(name, expression)            \
    CUDA_CPU_ATOMIC_OPERATION(name, int, expression)          \
    CUDA_CPU_ATOMIC_OPERATION(name, unsigned, expression)     \
    CUDA_CPU_ATOMIC_OPERATION(name, unsigned long long, expression)

CUDA_CPU_ATOMIC_INTEGERS(atomicAdd, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, float, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, double, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, __half, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, __half2, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, __nv_bfloat16, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, __nv_bfloat162, old + value)
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, float2, (float2{old.x + value.x, old.y + value.y}))
CUDA_CPU_ATOMIC_OPERATION(atomicAdd, float4, (float4{old.x + value.x, old.y + value.y, old.z + value.z, old.w + value.w}))
CUDA_CPU_ATOMIC_OPERATION(atomicSub, int, old - value)
CUDA_CPU_ATOMIC_OPERATION(atomicSub, unsigned, old - value)
CUDA_CPU_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
CUDA_CPU_ATOMIC_OPERATION(atomicMin, long long, value < old ? value : old)
CUDA_CPU_ATOMIC_INTEGERS(atomicMax, value > old ? value : old)
CUDA_CPU_ATOMIC_OPERATION(atomicMax, long long, value > old ? value : old)
CUDA_CPU_ATOMIC_INTEGERS(atomicAnd, old & value)
CUDA_CPU_ATOMIC_INTEGERS(atomicOr, old | value)
CUDA_CPU_ATOMIC_INTEGERS(atomicXor, old ^ value)
CUDA_CPU_ATOMIC_INTEGERS(atomicExch, ((void)old, value))
CUDA_CPU_ATOMIC_OPERATION(atomicExch, float, ((void)old, value))
CUDA_CPU_ATOMIC_OPERATION(atomicInc, unsigned, old >= value ? 0 : old + 1)
CUDA_CPU_ATOMIC_OPERATION(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
#undef CUDA_CPU_ATOMIC_INTEGERS
#undef CUDA_CPU_ATOMIC_OPERATION

#define CUDA_CPU_ATOMIC_EXCHANGE(T)                                                                                 \
    CUDA_CPU_INLINE T atomicCAS(T* address, T compare, T value) {                                                   \
        return cuda_cpu::atomic_update(address, [=](T old) -> T { return old == compare ? value : old; });          \
    }                                                                                                               \
    CUDA_CPU_INLINE T atomicCAS_block(T* address, T compare, T value) { return atomicCAS(address, compare, value); } \
    CUDA_CPU_INLINE T atomicCAS_system(T* address, T compare, T value) { return atomicCAS(address, compare, value); }
CUDA_CPU_ATOMIC_EXCHANGE(int)
CUDA_CPU_ATOMIC_EXCHANGE(unsigned)
CUDA_CPU_ATOMIC_EXCHANGE(unsigned long long)
CUDA_CPU_ATOMIC_EXCHANGE(unsigned short)
#undef CUDA_CPU_ATOMIC_EXCHANGE
