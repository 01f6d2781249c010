// CUDA C++ for a CPU: what a candidate's source needs of the language, so that g++ can compile it and the runtime run it.
// Threads are fibers of one process thread (see fibers.cpp), which is why `__shared__` can be plain static memory and
// an atomic operation a plain one.
#pragma once
#define __CUDA_AGENT_CPU__ 1

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../abi.h"

// The compile step tells a kernel from other functions by its symbol's visibility, which changes nothing in a program.
#define __global__ __attribute__((visibility("protected")))
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __inline_hint__
#define __nv_pure__
// Only where rewrite.rs could not read the declaration (inside a macro, say): such memory has no red zones.
#define __shared__ static

#define CUDA_CPU_INLINE static inline __attribute__((always_inline))
#define CUDA_CPU_MEMBER inline __attribute__((always_inline))
// What touches a location on behalf of an atomic operation must not be taken for a plain access. The source is preprocessed
// once for both programs, so the one that looks at memory has the call as well.
#define CUDA_CPU_ATOMIC __attribute__((noinline, no_sanitize("thread"))) inline
#define CUDA_CPU_CALLER __builtin_return_address(0)

#include "cuda_cpu/vectors.h"
#include "cuda_cpu/math.h"
#include "cuda_cpu/half.h"
#include "cuda_cpu/threads.h"
#include "cuda_cpu/atomics.h"
#include "cuda_cpu/host.h"
#include "cuda_cpu/task.h"
