// `TASK_LAUNCH` and `TASK_SCRATCH`, and how the runtime calls what a candidate declares. The generated header defines
// `TASK_PARAMETERS` and `TASK_ARGUMENTS` before these are used.
#pragma once
#include "launch_limits.h"

namespace cuda_cpu {
template <class T> struct no_const { typedef T type; static constexpr bool constant = false; };
template <class T> struct no_const<const T> { typedef T type; static constexpr bool constant = true; };
template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };

// Types that a tensor's elements can be called by, as `element_fits` of `task_machinery.h` has them.
template <class T> struct plain { typedef T type; };
template <> struct plain<long> { typedef long long type; };
template <> struct plain<char> { typedef signed char type; };
template <class Given, class Expected> struct element_fits {
    static constexpr bool value = same<typename plain<Given>::type, Expected>::value;
};
template <> struct element_fits<unsigned char, bool> { static constexpr bool value = true; };

// A kernel may leave out the `const` of an input, but not add one to an output.
template <class A, class B> struct pointer_fits { static constexpr bool value = false; };
template <class A, class B> struct pointer_fits<A*, B*> {
    static constexpr bool value = element_fits<typename no_const<A>::type, typename no_const<B>::type>::value &&
                                  (no_const<B>::constant || !no_const<A>::constant);
};

template <class... T> struct list {};
// Whether a kernel's parameters are the task's tensors, with perhaps one pointer more.
template <class Kernel, class Task> struct match { static constexpr bool value = false; };
template <> struct match<list<>, list<>> { static constexpr bool value = true; };
template <class Scratch> struct match<list<Scratch*>, list<>> { static constexpr bool value = true; };
template <class K, class... Ks, class T, class... Ts> struct match<list<K, Ks...>, list<T, Ts...>> {
    static constexpr bool value = pointer_fits<K, T>::value && match<list<Ks...>, list<Ts...>>::value;
};

template <unsigned... I> struct sequence {};
template <unsigned N, unsigned... I> struct counting : counting<N - 1, N - 1, I...> {};
template <unsigned... I> struct counting<0, I...> { typedef sequence<I...> type; };

// What is no function, or one that a launch can't call.
template <class F> struct function {
    static constexpr unsigned count = 0;
    template <class Task> static constexpr bool fits() { return false; }
    template <auto& f> static int call(void* const*) { return 0; }
};
template <class R, class... P> struct function<R(P...)> {
    typedef list<P...> parameters;
    static constexpr unsigned count = sizeof...(P);
    template <class Task> static constexpr bool fits() {
        return same<R, void>::value && match<list<P...>, typename function<Task>::parameters>::value;
    }

    // `pointers` are the task's tensors, then the scratch buffer and the stream.
    template <unsigned... I>
    __attribute__((no_sanitize("thread"))) static R invoke(R (*f)(P...), void* const* pointers, sequence<I...>) {
        return f(static_cast<P>(pointers[I])...);
    }
    template <R (*f)(P...)>
    __attribute__((no_sanitize("thread"))) static int call(void* const* pointers) {
        if constexpr (same<R, void>::value) {
            invoke(f, pointers, typename counting<sizeof...(P)>::type());
            return 0;
        } else {
            return (int)invoke(f, pointers, typename counting<sizeof...(P)>::type());
        }
    }
};

template <class Task> struct elements;
template <class... T> struct elements<void(T*...)> { static constexpr unsigned bytes[] = {sizeof(T)..., 0}; };

template <unsigned N> constexpr bool is_template(const char (&name)[N]) {
    for (char letter : name)
        if (letter == '<') return true;
    return false;
}

// Each launch has a line of its own, which orders them as well.
template <unsigned N>
constexpr cuda_cpu_record record(const char (&name)[N], unsigned line, unsigned arguments, task_internal::Size grid,
                                 task_internal::Size block, long long shared) {
    static_assert(N <= 64, "a kernel's name has at most 63 letters");
    cuda_cpu_record made{{},
                         {(unsigned)grid.x, (unsigned)grid.y, (unsigned)grid.z},
                         {(unsigned)block.x, (unsigned)block.y, (unsigned)block.z},
                         (unsigned)shared,
                         arguments,
                         line,
                         0};
    for (unsigned i = 0; i < N; i++) made.kernel[i] = name[i];
    return made;
}

// Tells the runtime of a launch: of a declared one with its record, of the host function without.
struct Registration {
    Registration(const cuda_cpu_record* record, cuda_cpu_call call, const char* names, const unsigned* element_bytes) {
        cuda_cpu_register(record, call, names, element_bytes);
    }
};
}  // namespace cuda_cpu

#define CUDA_CPU_TEXT_(...) #__VA_ARGS__
#define CUDA_CPU_TEXT(...) CUDA_CPU_TEXT_(__VA_ARGS__)
#define CUDA_CPU_JOIN_(a, b) a##b
#define CUDA_CPU_JOIN(a, b) CUDA_CPU_JOIN_(a, b)
#define CUDA_CPU_SECTION(name) __attribute__((section(name), used, aligned(8)))

#ifdef CUDA_CPU_FORMAT_LAUNCH
#define TASK_LAUNCH(...) static_assert(false, "a launch candidate launches in its function launch, without TASK_LAUNCH");
#else
#define TASK_LAUNCH(...) CUDA_CPU_PICK(__VA_ARGS__, CUDA_CPU_WRONG, CUDA_CPU_LAUNCH_4, CUDA_CPU_LAUNCH_3, CUDA_CPU_WRONG, CUDA_CPU_WRONG, 0)(__VA_ARGS__)
#endif
#define CUDA_CPU_PICK(a, b, c, d, e, picked, ...) picked
#define CUDA_CPU_WRONG(...) static_assert(false, "TASK_LAUNCH takes a kernel, a grid, a block, and perhaps bytes of shared memory");
#define CUDA_CPU_LAUNCH_3(kernel, grid, block) CUDA_CPU_LAUNCH_4(kernel, grid, block, 0)
// The linkage specification keeps it at file scope.
#define CUDA_CPU_LAUNCH_4(kernel, grid, block, shared)                                                                \
    extern "C++" {                                                                                                    \
    static_assert(!cuda_cpu::is_template(#kernel),                                                                    \
                  "TASK_LAUNCH(" #kernel "): a template can't be launched here: call it from a plain __global__ function"); \
    static_assert(cuda_cpu::function<decltype(kernel)>::fits<void(TASK_PARAMETERS)>(),                                \
                  #kernel " must take (" CUDA_CPU_TEXT(TASK_PARAMETERS) ") and may take a scratch pointer after them"); \
    TASK_CHECK_SIZES(kernel, grid, block, shared);                                                                    \
    CUDA_CPU_SECTION("cuda_cpu_launches")                                                                           \
    static constexpr cuda_cpu_record CUDA_CPU_JOIN(task_launch_, __LINE__) =                                          \
        cuda_cpu::record(#kernel, __LINE__, cuda_cpu::function<decltype(kernel)>::count, task_internal::size(grid),   \
                         task_internal::size(block), shared);                                                         \
    static const cuda_cpu::Registration CUDA_CPU_JOIN(cuda_cpu_registration_, __LINE__)(                              \
        &CUDA_CPU_JOIN(task_launch_, __LINE__), &cuda_cpu::function<decltype(kernel)>::call<kernel>,                  \
        CUDA_CPU_TEXT(TASK_ARGUMENTS), cuda_cpu::elements<void(TASK_PARAMETERS)>::bytes);                             \
    }

#define TASK_SCRATCH(bytes)                                              \
    extern "C++" {                                                       \
    static_assert((bytes) >= 0, "TASK_SCRATCH takes a number of bytes"); \
    CUDA_CPU_SECTION("cuda_cpu_scratch")                               \
    static constexpr unsigned long long task_scratch_bytes = (bytes);    \
    }

// What `launch` names where the candidate has none: names of the global namespace itself come before a using-directive's.
namespace cuda_cpu_without_launch {
struct Missing {};
extern Missing launch;
}  // namespace cuda_cpu_without_launch

// After the source of a `launch` candidate. The header declares `launch` with C linkage, under which nvcc takes no other types.
#define CUDA_CPU_PROTOTYPE "extern \"C\" cudaError_t launch(" CUDA_CPU_TEXT(TASK_PARAMETERS) ", void* scratch, cudaStream_t stream)"
#define CUDA_CPU_HOST_LAUNCH                                                                                          \
    using namespace cuda_cpu_without_launch;                                                                          \
    static_assert(!cuda_cpu::same<decltype(::launch), cuda_cpu_without_launch::Missing>::value,                       \
                  "there is no function launch: " CUDA_CPU_PROTOTYPE);                                                \
    static_assert(cuda_cpu::same<decltype(::launch), cudaError_t(TASK_PARAMETERS, void*, cudaStream_t)>::value,       \
                  "launch must be " CUDA_CPU_PROTOTYPE);                                                              \
    static const cuda_cpu::Registration cuda_cpu_host_registration(                                                   \
        nullptr, &cuda_cpu::function<decltype(::launch)>::call<::launch>, CUDA_CPU_TEXT(TASK_ARGUMENTS),              \
        cuda_cpu::elements<void(TASK_PARAMETERS)>::bytes);
