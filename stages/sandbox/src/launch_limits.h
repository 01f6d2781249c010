// What a launch may ask for, on either device, where there is a dim3. The CPU device includes it before the rest.
#if !defined(TASK_LAUNCH_LIMITS) && (defined(__CUDACC_RTC__) || defined(CUDA_CPU_INLINE))
#define TASK_LAUNCH_LIMITS
#if defined(__CUDACC__)
#define TASK_CONSTEXPR __host__ __device__ constexpr
#else
#define TASK_CONSTEXPR constexpr
#endif

namespace task_internal {
// In numbers that don't wrap.
struct Size {
    long long x, y, z;
};
template <class T> constexpr bool is_size = T(1) / T(2) == T(0);
template <> inline constexpr bool is_size<dim3> = true;
template <> inline constexpr bool is_size<const dim3> = true;
template <class T> constexpr bool is_size<T&> = is_size<T>;
template <class T> TASK_CONSTEXPR Size size(T x) { return Size{(long long)x, 1, 1}; }
TASK_CONSTEXPR Size size(dim3 all) { return Size{all.x, all.y, all.z}; }

TASK_CONSTEXPR bool grid_fits(Size s) {
    return s.x > 0 && s.y > 0 && s.z > 0 && s.x <= 0x7fffffff && s.y <= 65535 && s.z <= 65535;
}
TASK_CONSTEXPR bool block_fits(Size s) {
    return s.x > 0 && s.y > 0 && s.z > 0 && s.x <= 1024 && s.y <= 1024 && s.z <= 64 && s.x * s.y * s.z <= 1024;
}
}  // namespace task_internal

#define TASK_CHECK_SIZES(kernel, grid, block, shared)                                                                             \
    static_assert(task_internal::is_size<decltype(grid)> && task_internal::is_size<decltype(block)>,                              \
                  "TASK_LAUNCH(" #kernel "): a grid or a block is an integer or a dim3");                                         \
    static_assert(task_internal::grid_fits(task_internal::size(grid)),                                                            \
                  "TASK_LAUNCH(" #kernel "): a grid has 1 to 2147483647 blocks in x, 1 to 65535 in y and in z");                  \
    static_assert(task_internal::block_fits(task_internal::size(block)),                                                          \
                  "TASK_LAUNCH(" #kernel "): a block has 1 to 1024 threads, at most 64 of them in z");                            \
    static_assert((shared) >= 0 && (shared) <= 232448, "TASK_LAUNCH(" #kernel "): a block has at most 232448 bytes of shared memory")
#endif

