// Limits of types, INFINITY and the like need no #include, whatever the compiler.
#if defined(__CUDACC_RTC__)
#include "cuda_agent/usual.h"
#else
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#endif

namespace task_internal {
template <class... T> struct List {};
template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// Types that a tensor's elements can be called by: int64_t is long, torch's is long long; a bool can be read as a byte.
template <class T> struct Plain { using type = T; };
template <> struct Plain<long> { using type = long long; };
template <> struct Plain<char> { using type = signed char; };
template <class Given, class Expected> constexpr bool element_fits = same<typename Plain<Given>::type, Expected>;
template <> inline constexpr bool element_fits<unsigned char, bool> = true;

// What is read may be taken as const or not, what is written may not be const.
template <class Given, class Expected> constexpr bool pointee_fits = element_fits<Given, Expected>;
template <class Given, class Expected> constexpr bool pointee_fits<const Given, const Expected> = element_fits<Given, Expected>;
template <class Given, class Expected> constexpr bool pointee_fits<Given, const Expected> = element_fits<Given, Expected>;

template <class Given, class Expected> constexpr bool list_fits = false;
template <> inline constexpr bool list_fits<List<>, List<>> = true;
template <class Scratch> constexpr bool list_fits<List<Scratch*>, List<>> = true;
template <class Given, class... MoreGiven, class Expected, class... MoreExpected>
constexpr bool list_fits<List<Given*, MoreGiven...>, List<Expected*, MoreExpected...>> =
    pointee_fits<Given, Expected> && list_fits<List<MoreGiven...>, List<MoreExpected...>>;

template <class Function> struct Kernel {
    static constexpr bool fits = false;
    static constexpr unsigned arguments = 0;
};
template <class... Given> struct Kernel<void(Given...)> {
    static constexpr bool fits = list_fits<List<Given...>, List<TASK_PARAMETER_TYPES>>;
    static constexpr unsigned arguments = sizeof...(Given);
};
}  // namespace task_internal

// Says in one line what is wrong with a kernel's parameters.
#define TASK_CHECK_KERNEL(kernel)                                          \
    static_assert(task_internal::Kernel<decltype(kernel)>::fits,           \
                  #kernel " must take " TASK_PARAMETERS_TEXT " and may take a scratch pointer after them")

#define TASK_JOIN_TEXT(a, b) a##b
#define TASK_JOIN(a, b) TASK_JOIN_TEXT(a, b)

#ifndef TASK_LAUNCH
#if defined(__CUDACC_RTC__)
namespace task_internal {
// compile/cubin.rs reads this out of the machine code: its layout is a contract.
struct Launch {
    char kernel[64];
    unsigned grid[3], block[3], shared, arguments, line;
};

template <unsigned length>
TASK_CONSTEXPR Launch launch(const char (&kernel)[length], Size grid, Size block, long long shared, unsigned arguments,
                             unsigned line) {
    static_assert(length <= 64, "a kernel's name has at most 63 letters");
    Launch all{};
    for (unsigned i = 0; i < length; ++i) all.kernel[i] = kernel[i];
    all.grid[0] = (unsigned)grid.x, all.grid[1] = (unsigned)grid.y, all.grid[2] = (unsigned)grid.z;
    all.block[0] = (unsigned)block.x, all.block[1] = (unsigned)block.y, all.block[2] = (unsigned)block.z;
    all.shared = (unsigned)shared, all.arguments = arguments, all.line = line;
    return all;
}
}  // namespace task_internal

#define TASK_LAUNCH(...) TASK_LAUNCH_PICK(__VA_ARGS__, TASK_LAUNCH_WRONG, TASK_LAUNCH_4, TASK_LAUNCH_3, TASK_LAUNCH_WRONG, TASK_LAUNCH_WRONG, 0)(__VA_ARGS__)
#define TASK_LAUNCH_PICK(a, b, c, d, e, picked, ...) picked
#define TASK_LAUNCH_WRONG(...) static_assert(false, "TASK_LAUNCH takes a kernel, a grid, a block, and perhaps bytes of shared memory");
#define TASK_LAUNCH_3(kernel, grid, block) TASK_LAUNCH_4(kernel, grid, block, 0)
#define TASK_LAUNCH_4(kernel, grid, block, shared)                                                                                \
    TASK_CHECK_KERNEL(kernel);                                                                                                    \
    TASK_CHECK_SIZES(kernel, grid, block, shared);                                                                                \
    extern "C" __device__ constexpr task_internal::Launch TASK_JOIN(task_launch_, __LINE__) =                                     \
        task_internal::launch(#kernel, task_internal::size(grid), task_internal::size(block), shared,                             \
                              task_internal::Kernel<decltype(kernel)>::arguments, __LINE__);
#else
#define TASK_LAUNCH(...) static_assert(false, "a launch candidate launches in its function launch, without TASK_LAUNCH");
#endif
#endif

#ifndef TASK_SCRATCH
#if defined(__CUDACC_RTC__)
#define TASK_SCRATCH(bytes)                                                \
    static_assert((bytes) >= 0, "TASK_SCRATCH takes a number of bytes");   \
    extern "C" __device__ constexpr unsigned long long task_scratch_bytes = (bytes);
#else
#define TASK_SCRATCH(bytes)                                                \
    static_assert((bytes) >= 0, "TASK_SCRATCH takes a number of bytes");   \
    extern "C" {                                                           \
    extern const unsigned long long task_scratch_bytes;                    \
    const unsigned long long task_scratch_bytes = (bytes);                 \
    }
#endif
#endif

// The host function of a launch candidate.
#if (defined(__CUDACC__) && !defined(__CUDACC_RTC__)) || defined(TASK_FORMAT_LAUNCH)
extern "C" cudaError_t launch(TASK_PARAMETERS, void* scratch, cudaStream_t stream);
#if defined(__CUDACC__)
// What the runner calls: it knows how many arguments there are, but has no C++ type for them.
extern "C" int task_run(void* const* arguments, cudaStream_t stream) {
    return (int)launch(TASK_ARGUMENTS_OF(arguments), stream);
}
#endif
#endif
