// `TASK_LAUNCH` and `TASK_SCRATCH`, and how the runtime calls what a candidate declares. The generated header defines
// `TASK_PARAMETERS` and `TASK_ARGUMENTS` before these are used.
#pragma once

namespace cuda_cpu {
template <class T> struct no_const { typedef T type; static constexpr bool constant = false; };
template <class T> struct no_const<const T> { typedef T type; static constexpr bool constant = true; };
template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };

// A kernel may leave out the `const` of an input, but not add one to an output.
template <class A, class B> struct same_pointer { static constexpr bool value = same<A, B>::value; };
template <class A, class B> struct same_pointer<A*, B*> {
    static constexpr bool value = same<typename no_const<A>::type, typename no_const<B>::type>::value &&
                                  (no_const<B>::constant || !no_const<A>::constant);
};

template <class... T> struct list {};
// Whether a kernel's parameters are the task's tensors, with perhaps one pointer more.
template <class Kernel, class Task> struct match { static constexpr bool value = false; };
template <> struct match<list<>, list<>> { static constexpr bool value = true; };
template <class Scratch> struct match<list<Scratch*>, list<>> { static constexpr bool value = true; };
template <class K, class... Ks, class T, class... Ts> struct match<list<K, Ks...>, list<T, Ts...>> {
    static constexpr bool value = same_pointer<K, T>::value && match<list<Ks...>, list<Ts...>>::value;
};

template <unsigned... I> struct sequence {};
template <unsigned N, unsigned... I> struct counting : counting<N - 1, N - 1, I...> {};
template <unsigned... I> struct counting<0, I...> { typedef sequence<I...> type; };

template <class F> struct function;
template <class R, class... P> struct function<R(P...)> {
    typedef list<P...> parameters;
    static constexpr unsigned count = sizeof...(P);
    template <class Task> static constexpr bool fits() { return match<list<P...>, typename function<Task>::parameters>::value; }

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

template <unsigned N>
constexpr cuda_cpu_record record(const char (&name)[N], unsigned order, unsigned arguments, dim3 grid, dim3 block, unsigned shared = 0) {
    static_assert(N <= 64, "a kernel's name has at most 63 characters");
    cuda_cpu_record made{{}, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, arguments, order, 0};
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

#define TASK_LAUNCH(kernel, ...) CUDA_CPU_TASK_LAUNCH(__COUNTER__, kernel, __VA_ARGS__)
#define CUDA_CPU_TASK_LAUNCH(id, kernel, ...)                                                                         \
    static_assert(cuda_cpu::function<decltype(kernel)>::fits<void(TASK_PARAMETERS)>(),                                \
                  #kernel " must take (" CUDA_CPU_TEXT(TASK_PARAMETERS) ") and may take a scratch pointer");          \
    CUDA_CPU_SECTION("cuda_agent_launches")                                                                           \
    static constexpr cuda_cpu_record CUDA_CPU_JOIN(cuda_cpu_record_, id) =                                            \
        cuda_cpu::record(#kernel, id, cuda_cpu::function<decltype(kernel)>::count, __VA_ARGS__);                          \
    static const cuda_cpu::Registration CUDA_CPU_JOIN(cuda_cpu_registration_, id)(                              \
        &CUDA_CPU_JOIN(cuda_cpu_record_, id),                                                                         \
        &cuda_cpu::function<decltype(kernel)>::call<kernel>, CUDA_CPU_TEXT(TASK_ARGUMENTS),                           \
        cuda_cpu::elements<void(TASK_PARAMETERS)>::bytes);

#define TASK_SCRATCH(bytes)                   \
    CUDA_CPU_SECTION("cuda_agent_scratch")    \
    static constexpr unsigned long long cuda_agent_scratch_bytes = (bytes);

// After the source of a `launch` candidate.
#define CUDA_CPU_HOST_LAUNCH                                                                                          \
    static_assert(cuda_cpu::same<decltype(launch), cudaError_t(TASK_PARAMETERS, void*, cudaStream_t)>::value,         \
                  "launch must be: cudaError_t launch(" CUDA_CPU_TEXT(TASK_PARAMETERS) ", void* scratch, cudaStream_t stream)"); \
    static const cuda_cpu::Registration cuda_cpu_host_registration(                                                   \
        nullptr, &cuda_cpu::function<decltype(launch)>::call<launch>, CUDA_CPU_TEXT(TASK_ARGUMENTS),                  \
        cuda_cpu::elements<void(TASK_PARAMETERS)>::bytes);
