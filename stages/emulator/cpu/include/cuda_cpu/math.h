// CUDA's mathematical functions and intrinsics that C's library lacks. Fast intrinsics are computed exactly: what a
// candidate loses by them shows on the GPU only.
#pragma once

namespace cuda_cpu {
template <class To, class From>
CUDA_CPU_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    return __builtin_bit_cast(To, from);
}
}  // namespace cuda_cpu

// Reinterpretation.
CUDA_CPU_INLINE int __float_as_int(float x) { return cuda_cpu::bit_cast<int>(x); }
CUDA_CPU_INLINE unsigned __float_as_uint(float x) { return cuda_cpu::bit_cast<unsigned>(x); }
CUDA_CPU_INLINE float __int_as_float(int x) { return cuda_cpu::bit_cast<float>(x); }
CUDA_CPU_INLINE float __uint_as_float(unsigned x) { return cuda_cpu::bit_cast<float>(x); }
CUDA_CPU_INLINE long long __double_as_longlong(double x) { return cuda_cpu::bit_cast<long long>(x); }
CUDA_CPU_INLINE double __longlong_as_double(long long x) { return cuda_cpu::bit_cast<double>(x); }
CUDA_CPU_INLINE int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
CUDA_CPU_INLINE int __double2loint(double x) { return (int)__double_as_longlong(x); }
CUDA_CPU_INLINE double __hiloint2double(int high, int low) {
    return __longlong_as_double(((long long)high << 32) | (unsigned)low);
}

// Smaller and larger, in the pairs of types that CUDA has.
#define CUDA_CPU_MIN_MAX(R, A, B)                                            \
    CUDA_CPU_INLINE constexpr R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
    CUDA_CPU_INLINE constexpr R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
CUDA_CPU_MIN_MAX(int, int, int)
CUDA_CPU_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_CPU_MIN_MAX(unsigned, int, unsigned)
CUDA_CPU_MIN_MAX(unsigned, unsigned, int)
CUDA_CPU_MIN_MAX(long, long, long)
CUDA_CPU_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_CPU_MIN_MAX(unsigned long, long, unsigned long)
CUDA_CPU_MIN_MAX(unsigned long, unsigned long, long)
CUDA_CPU_MIN_MAX(long long, long long, long long)
CUDA_CPU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUDA_CPU_MIN_MAX(unsigned long long, long long, unsigned long long)
CUDA_CPU_MIN_MAX(unsigned long long, unsigned long long, long long)
#undef CUDA_CPU_MIN_MAX
CUDA_CPU_INLINE float min(float a, float b) { return fminf(a, b); }
CUDA_CPU_INLINE float max(float a, float b) { return fmaxf(a, b); }
CUDA_CPU_INLINE double min(double a, double b) { return fmin(a, b); }
CUDA_CPU_INLINE double max(double a, double b) { return fmax(a, b); }
CUDA_CPU_INLINE double min(float a, double b) { return fmin(a, b); }
CUDA_CPU_INLINE double max(float a, double b) { return fmax(a, b); }
CUDA_CPU_INLINE double min(double a, float b) { return fmin(a, b); }
CUDA_CPU_INLINE double max(double a, float b) { return fmax(a, b); }
CUDA_CPU_INLINE int umin(unsigned a, unsigned b) { return a < b ? a : b; }
CUDA_CPU_INLINE int umax(unsigned a, unsigned b) { return a > b ? a : b; }

// Functions beyond C's.
CUDA_CPU_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
CUDA_CPU_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
CUDA_CPU_INLINE float rsqrt(float x) { return rsqrtf(x); }
CUDA_CPU_INLINE float rcbrtf(float x) { return 1.0f / cbrtf(x); }
CUDA_CPU_INLINE double rcbrt(double x) { return 1.0 / cbrt(x); }
CUDA_CPU_INLINE double sinpi(double x) { return sin(fmod(x, 2.0) * 3.14159265358979323846); }
CUDA_CPU_INLINE double cospi(double x) { return cos(fmod(x, 2.0) * 3.14159265358979323846); }
CUDA_CPU_INLINE float sinpif(float x) { return (float)sinpi(x); }
CUDA_CPU_INLINE float cospif(float x) { return (float)cospi(x); }
CUDA_CPU_INLINE void sincospi(double x, double* s, double* c) { *s = sinpi(x), *c = cospi(x); }
CUDA_CPU_INLINE void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }

// Lengths of vectors, and one over them. Where squares leave the type's range CUDA's don't: `hypot` does not either.
CUDA_CPU_INLINE double norm3d(double x, double y, double z) { return hypot(hypot(x, y), z); }
CUDA_CPU_INLINE double norm4d(double x, double y, double z, double w) { return hypot(norm3d(x, y, z), w); }
CUDA_CPU_INLINE double norm(int count, const double* x) {
    double length = 0.0;
    for (int i = 0; i < count; i++) length = hypot(length, x[i]);
    return length;
}
CUDA_CPU_INLINE float normf(int count, const float* x) {
    double squares = 0.0;
    for (int i = 0; i < count; i++) squares += (double)x[i] * x[i];
    return (float)sqrt(squares);
}
CUDA_CPU_INLINE float norm3df(float x, float y, float z) { return (float)norm3d(x, y, z); }
CUDA_CPU_INLINE float norm4df(float x, float y, float z, float w) { return (float)norm4d(x, y, z, w); }
CUDA_CPU_INLINE double rhypot(double x, double y) { return 1.0 / hypot(x, y); }
CUDA_CPU_INLINE double rnorm3d(double x, double y, double z) { return 1.0 / norm3d(x, y, z); }
CUDA_CPU_INLINE double rnorm4d(double x, double y, double z, double w) { return 1.0 / norm4d(x, y, z, w); }
CUDA_CPU_INLINE double rnorm(int count, const double* x) { return 1.0 / norm(count, x); }
CUDA_CPU_INLINE float rhypotf(float x, float y) { return (float)rhypot(x, y); }
CUDA_CPU_INLINE float rnorm3df(float x, float y, float z) { return (float)rnorm3d(x, y, z); }
CUDA_CPU_INLINE float rnorm4df(float x, float y, float z, float w) { return (float)rnorm4d(x, y, z, w); }
CUDA_CPU_INLINE float rnormf(int count, const float* x) { return 1.0f / normf(count, x); }

// The error function's relatives.
CUDA_CPU_INLINE double erfcx(double x) {
    if (x < 10.0) return exp(x * x) * erfc(x);
    // erfc underflows further out; its continued fraction converges fast there.
    double fraction = x;
    for (int k = 60; k > 0; k--) fraction = x + 0.5 * k / fraction;
    return 0.56418958354775628695 / fraction;
}
CUDA_CPU_INLINE double erfcinv(double x) {
    if (x == 0.0 || x == 2.0) return x == 0.0 ? INFINITY : -INFINITY;
    double tail = x < 1.0 ? x : 2.0 - x, t = sqrt(-2.0 * log(tail / 2.0));
    // Abramowitz and Stegun 26.2.22 to three digits, then Halley's method, each step of which triples them.
    double y = 0.70711 * (t - (2.30753 + 0.27061 * t) / (1.0 + t * (0.99229 + 0.04481 * t)));
    for (int step = 0; step < 3; step++) {
        double error = erfc(y) - tail;
        y += error / (1.12837916709551257390 * exp(-y * y) - y * error);
    }
    return x < 1.0 ? y : -y;
}
CUDA_CPU_INLINE double erfinv(double x) {
    if (fabs(x) < 1e-8) return x * 0.88622692545275801365;
    double y = erfcinv(1.0 - x);
    // `1 - x` has lost the last digits of a small `x`.
    if (fabs(x) < 0.5) y -= (erf(y) - x) / (1.12837916709551257390 * exp(-y * y));
    return y;
}
CUDA_CPU_INLINE double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
CUDA_CPU_INLINE double normcdfinv(double x) { return -1.41421356237309504880 * erfcinv(2.0 * x); }
CUDA_CPU_INLINE float erfcxf(float x) { return (float)erfcx(x); }
CUDA_CPU_INLINE float erfcinvf(float x) { return (float)erfcinv(x); }
CUDA_CPU_INLINE float erfinvf(float x) { return (float)erfinv(x); }
CUDA_CPU_INLINE float normcdff(float x) { return (float)normcdf(x); }
CUDA_CPU_INLINE float normcdfinvf(float x) { return (float)normcdfinv(x); }

// Modified Bessel functions: sums of positive terms.
namespace cuda_cpu {
CUDA_CPU_INLINE double bessel_i(int order, double x) {
    double square = x * x / 4.0, term = order ? x / 2.0 : 1.0, sum = term;
    for (double k = 1.0; fabs(term) > 1e-17 * fabs(sum) && fabs(sum) < INFINITY; k++) {
        term *= square / (k * (k + order));
        sum += term;
    }
    return sum;
}
}  // namespace cuda_cpu
CUDA_CPU_INLINE double cyl_bessel_i0(double x) { return cuda_cpu::bessel_i(0, x); }
CUDA_CPU_INLINE double cyl_bessel_i1(double x) { return cuda_cpu::bessel_i(1, x); }
CUDA_CPU_INLINE float cyl_bessel_i0f(float x) { return (float)cyl_bessel_i0(x); }
CUDA_CPU_INLINE float cyl_bessel_i1f(float x) { return (float)cyl_bessel_i1(x); }

CUDA_CPU_INLINE float fdividef(float x, float y) { return x / y; }
CUDA_CPU_INLINE float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
#ifndef _GNU_SOURCE
extern "C" float exp10f(float) noexcept;
extern "C" double exp10(double) noexcept;
extern "C" void sincosf(float, float*, float*) noexcept;
extern "C" void sincos(double, double*, double*) noexcept;
#endif

// Fast intrinsics. The C library has functions of these names to itself, hence the other names.
#define __expf cuda_cpu_expf
#define __exp10f cuda_cpu_exp10f
#define __exp2f cuda_cpu_exp2f
#define __logf cuda_cpu_logf
#define __log2f cuda_cpu_log2f
#define __log10f cuda_cpu_log10f
#define __sinf cuda_cpu_sinf
#define __cosf cuda_cpu_cosf
#define __tanf cuda_cpu_tanf
#define __tanhf cuda_cpu_tanhf
#define __powf cuda_cpu_powf
#define __sincosf cuda_cpu_sincosf
CUDA_CPU_INLINE float __expf(float x) { return expf(x); }
CUDA_CPU_INLINE float __exp10f(float x) { return exp10f(x); }
CUDA_CPU_INLINE float __exp2f(float x) { return exp2f(x); }
CUDA_CPU_INLINE float __logf(float x) { return logf(x); }
CUDA_CPU_INLINE float __log2f(float x) { return log2f(x); }
CUDA_CPU_INLINE float __log10f(float x) { return log10f(x); }
CUDA_CPU_INLINE float __sinf(float x) { return sinf(x); }
CUDA_CPU_INLINE float __cosf(float x) { return cosf(x); }
CUDA_CPU_INLINE float __tanf(float x) { return tanf(x); }
CUDA_CPU_INLINE float __tanhf(float x) { return tanhf(x); }
CUDA_CPU_INLINE float __powf(float x, float y) { return powf(x, y); }
CUDA_CPU_INLINE float __fdividef(float x, float y) { return x / y; }
CUDA_CPU_INLINE void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
CUDA_CPU_INLINE float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }

// Operations with a named rounding: to nearest is what the CPU does; the others differ by less than one unit.
#define CUDA_CPU_ROUNDED(mode)                                                                     \
    CUDA_CPU_INLINE float __fadd_##mode(float a, float b) { return a + b; }                        \
    CUDA_CPU_INLINE float __fsub_##mode(float a, float b) { return a - b; }                        \
    CUDA_CPU_INLINE float __fmul_##mode(float a, float b) { return a * b; }                        \
    CUDA_CPU_INLINE float __fdiv_##mode(float a, float b) { return a / b; }                        \
    CUDA_CPU_INLINE float __frcp_##mode(float a) { return 1.0f / a; }                              \
    CUDA_CPU_INLINE float __fsqrt_##mode(float a) { return sqrtf(a); }                             \
    CUDA_CPU_INLINE float __fmaf_##mode(float a, float b, float c) { return fmaf(a, b, c); }       \
    CUDA_CPU_INLINE double __dadd_##mode(double a, double b) { return a + b; }                     \
    CUDA_CPU_INLINE double __dsub_##mode(double a, double b) { return a - b; }                     \
    CUDA_CPU_INLINE double __dmul_##mode(double a, double b) { return a * b; }                     \
    CUDA_CPU_INLINE double __ddiv_##mode(double a, double b) { return a / b; }                     \
    CUDA_CPU_INLINE double __drcp_##mode(double a) { return 1.0 / a; }                             \
    CUDA_CPU_INLINE double __dsqrt_##mode(double a) { return sqrt(a); }                            \
    CUDA_CPU_INLINE double __fma_##mode(double a, double b, double c) { return fma(a, b, c); }     \
    CUDA_CPU_INLINE float __double2float_##mode(double a) { return (float)a; }                     \
    CUDA_CPU_INLINE float __int2float_##mode(int a) { return (float)a; }                           \
    CUDA_CPU_INLINE float __uint2float_##mode(unsigned a) { return (float)a; }                     \
    CUDA_CPU_INLINE float __ll2float_##mode(long long a) { return (float)a; }                      \
    CUDA_CPU_INLINE float __ull2float_##mode(unsigned long long a) { return (float)a; }            \
    CUDA_CPU_INLINE double __ll2double_##mode(long long a) { return (double)a; }                   \
    CUDA_CPU_INLINE double __ull2double_##mode(unsigned long long a) { return (double)a; }
CUDA_CPU_ROUNDED(rn)
CUDA_CPU_ROUNDED(rz)
CUDA_CPU_ROUNDED(ru)
CUDA_CPU_ROUNDED(rd)
#undef CUDA_CPU_ROUNDED
CUDA_CPU_INLINE double __int2double_rn(int a) { return a; }
CUDA_CPU_INLINE double __uint2double_rn(unsigned a) { return a; }

// To integers, saturating as the GPU does, with NaN as zero.
namespace cuda_cpu {
template <class I, class F>
CUDA_CPU_INLINE I to_integer(F x) {
    constexpr I largest = (I)-1 > 0 ? (I)-1 : (I)(((unsigned long long)1 << (sizeof(I) * 8 - 1)) - 1);
    constexpr I smallest = (I)-1 > 0 ? 0 : (I)(-largest - 1);
    if (x != x) return 0;
    if (x >= (F)largest) return largest;
    return x <= (F)smallest ? smallest : (I)x;
}
}  // namespace cuda_cpu
#define CUDA_CPU_CONVERTED_TO(I, name, mode, round_float, round_double)                             \
    CUDA_CPU_INLINE I __float2##name##_##mode(float x) { return cuda_cpu::to_integer<I>(round_float(x)); } \
    CUDA_CPU_INLINE I __double2##name##_##mode(double x) { return cuda_cpu::to_integer<I>(round_double(x)); }
#define CUDA_CPU_CONVERTED(mode, round_float, round_double)                          \
    CUDA_CPU_CONVERTED_TO(int, int, mode, round_float, round_double)                 \
    CUDA_CPU_CONVERTED_TO(unsigned, uint, mode, round_float, round_double)           \
    CUDA_CPU_CONVERTED_TO(long long, ll, mode, round_float, round_double)            \
    CUDA_CPU_CONVERTED_TO(unsigned long long, ull, mode, round_float, round_double)
CUDA_CPU_CONVERTED(rn, rintf, rint)
CUDA_CPU_CONVERTED(rz, truncf, trunc)
CUDA_CPU_CONVERTED(ru, ceilf, ceil)
CUDA_CPU_CONVERTED(rd, floorf, floor)
#undef CUDA_CPU_CONVERTED
#undef CUDA_CPU_CONVERTED_TO

// Integers and bits.
CUDA_CPU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
CUDA_CPU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
CUDA_CPU_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
CUDA_CPU_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
CUDA_CPU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
CUDA_CPU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
CUDA_CPU_INLINE unsigned long long __brevll(unsigned long long x) {
    x = (x >> 1 & 0x5555555555555555ull) | (x & 0x5555555555555555ull) << 1;
    x = (x >> 2 & 0x3333333333333333ull) | (x & 0x3333333333333333ull) << 2;
    x = (x >> 4 & 0x0f0f0f0f0f0f0f0full) | (x & 0x0f0f0f0f0f0f0f0full) << 4;
    return __builtin_bswap64(x);
}
CUDA_CPU_INLINE unsigned __brev(unsigned x) { return (unsigned)(__brevll(x) >> 32); }
CUDA_CPU_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned choice = selector >> (4 * i) & 0xf, byte = bytes >> (8 * (choice & 7)) & 0xff;
        result |= (choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
    }
    return result;
}
CUDA_CPU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
CUDA_CPU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
CUDA_CPU_INLINE unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    return shift < 32 ? __funnelshift_l(low, high, shift) : low;
}
CUDA_CPU_INLINE unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return shift < 32 ? __funnelshift_r(low, high, shift) : high;
}
CUDA_CPU_INLINE int __mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
CUDA_CPU_INLINE unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
CUDA_CPU_INLINE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
CUDA_CPU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
CUDA_CPU_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
CUDA_CPU_INLINE long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
CUDA_CPU_INLINE unsigned __sad(int a, int b, unsigned c) { return (unsigned)(a > b ? a - b : b - a) + c; }
CUDA_CPU_INLINE unsigned __usad(unsigned a, unsigned b, unsigned c) { return (a > b ? a - b : b - a) + c; }
// Means, rounded down and, with an r, up.
CUDA_CPU_INLINE int __hadd(int a, int b) { return (int)(((long long)a + b) >> 1); }
CUDA_CPU_INLINE int __rhadd(int a, int b) { return (int)(((long long)a + b + 1) >> 1); }
CUDA_CPU_INLINE unsigned __uhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b) >> 1); }
CUDA_CPU_INLINE unsigned __urhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b + 1) >> 1); }
CUDA_CPU_INLINE int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (signed char)(a >> (8 * i)) * (signed char)(b >> (8 * i));
    return c;
}
