// The parts of the C++ standard library that device code uses: not a library, just enough for the usual includes.
#pragma once
#include "cuda_agent/usual.h"

namespace std {
using ::int8_t;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::uint8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::intptr_t;
using ::uintptr_t;
using ::size_t;
using ::ptrdiff_t;
using ::sqrt;
using ::cbrt;
using ::exp;
using ::exp2;
using ::expm1;
using ::log;
using ::log2;
using ::log10;
using ::log1p;
using ::pow;
using ::sin;
using ::cos;
using ::tan;
using ::asin;
using ::acos;
using ::atan;
using ::atan2;
using ::sinh;
using ::cosh;
using ::tanh;
using ::asinh;
using ::acosh;
using ::atanh;
using ::erf;
using ::erfc;
using ::tgamma;
using ::lgamma;
using ::fabs;
using ::abs;
using ::fmod;
using ::remainder;
using ::fmax;
using ::fmin;
using ::fdim;
using ::fma;
using ::floor;
using ::ceil;
using ::trunc;
using ::round;
using ::lround;
using ::llround;
using ::rint;
using ::nearbyint;
using ::lrint;
using ::llrint;
using ::hypot;
using ::copysign;
using ::nextafter;
using ::ldexp;
using ::frexp;
using ::modf;
using ::scalbn;
using ::ilogb;
using ::logb;
using ::isnan;
using ::isinf;
using ::isfinite;
using ::signbit;
using ::labs;
using ::llabs;

template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool condition, class T = void> using enable_if_t = typename enable_if<condition, T>::type;
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool condition, class A, class B> using conditional_t = typename conditional<condition, A, B>::type;

template <class T, T v> struct integral_constant {
    static constexpr T value = v;
    using type = integral_constant;
    __host__ __device__ constexpr operator T() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;

template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> struct remove_cv<volatile T> { using type = T; };
template <class T> struct remove_cv<const volatile T> { using type = T; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;

template <class T> struct is_floating_point
    : bool_constant<is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, double>> {};
template <class T> inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T, class... Of> inline constexpr bool cuda_agent_is_one_of = (is_same_v<remove_cv_t<T>, Of> || ...);
template <class T> struct is_integral
    : bool_constant<cuda_agent_is_one_of<T, bool, char, signed char, unsigned char, short, unsigned short, int, unsigned, long,
                                         unsigned long, long long, unsigned long long>> {};
template <class T> inline constexpr bool is_integral_v = is_integral<T>::value;
template <class T> inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;

template <class T> __host__ __device__ constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> __host__ __device__ constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
template <class T> __host__ __device__ constexpr const T& clamp(const T& v, const T& low, const T& high) {
    return v < low ? low : high < v ? high : v;
}
template <class T> __host__ __device__ constexpr void swap(T& a, T& b) {
    T kept = a;
    a = b;
    b = kept;
}

template <class T> struct numeric_limits { static constexpr bool is_specialized = false; };
#define CUDA_AGENT_LIMITS(T, least, greatest, smallest, step, infinite, not_a_number)                     \
    template <> struct numeric_limits<T> {                                                                \
        static constexpr bool is_specialized = true;                                                      \
        __host__ __device__ static constexpr T lowest() { return least; }                                 \
        __host__ __device__ static constexpr T max() { return greatest; }                                 \
        __host__ __device__ static constexpr T min() { return smallest; }                                 \
        __host__ __device__ static constexpr T epsilon() { return step; }                                 \
        __host__ __device__ static constexpr T infinity() { return infinite; }                            \
        __host__ __device__ static constexpr T quiet_NaN() { return not_a_number; }                       \
    };
#define CUDA_AGENT_INTEGER_LIMITS(T, least, greatest) CUDA_AGENT_LIMITS(T, least, greatest, least, 0, 0, 0)
CUDA_AGENT_LIMITS(float, -FLT_MAX, FLT_MAX, FLT_MIN, FLT_EPSILON, INFINITY, NAN)
CUDA_AGENT_LIMITS(double, -DBL_MAX, DBL_MAX, DBL_MIN, DBL_EPSILON, HUGE_VAL, (__builtin_bit_cast(double, 0x7ff8000000000000LL)))
CUDA_AGENT_INTEGER_LIMITS(signed char, SCHAR_MIN, SCHAR_MAX)
CUDA_AGENT_INTEGER_LIMITS(unsigned char, 0, UCHAR_MAX)
CUDA_AGENT_INTEGER_LIMITS(short, SHRT_MIN, SHRT_MAX)
CUDA_AGENT_INTEGER_LIMITS(unsigned short, 0, USHRT_MAX)
CUDA_AGENT_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
CUDA_AGENT_INTEGER_LIMITS(unsigned, 0, UINT_MAX)
CUDA_AGENT_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX)
CUDA_AGENT_INTEGER_LIMITS(unsigned long, 0, ULONG_MAX)
CUDA_AGENT_INTEGER_LIMITS(long long, LLONG_MIN, LLONG_MAX)
CUDA_AGENT_INTEGER_LIMITS(unsigned long long, 0, ULLONG_MAX)
}  // namespace std
