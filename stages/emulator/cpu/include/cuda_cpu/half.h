// `__half` and `__nv_bfloat16`: 16-bit floats that compute through `float` and round to nearest even, once.
#pragma once

namespace cuda_cpu {
// Double to float so that a second rounding cannot go wrong: the last bit is set where the float is not exact.
CUDA_CPU_INLINE float round_to_odd(double x) {
    float nearest = (float)x;
    if ((double)nearest == x || x != x) return nearest;
    unsigned bits = bit_cast<unsigned>(nearest);
    if ((bits & 0x7fffffffu) >= 0x7f800000u) return nearest;
    if (bits & 1) return nearest;
    bool away = (nearest < 0 ? -(double)nearest : (double)nearest) > (x < 0 ? -x : x);
    return bit_cast<float>(away ? bits - 1 : bits + 1);
}

CUDA_CPU_INLINE unsigned short half_bits(float value) {
    unsigned x = bit_cast<unsigned>(value), sign = x >> 16 & 0x8000;
    x &= 0x7fffffff;
    if (x > 0x7f800000) return 0x7fff;
    if (x >= 0x47800000) return (unsigned short)(sign | 0x7c00);
    // Below the smallest normal number: adding a half aligns the bits so that the addition itself rounds.
    if (x < 0x38800000) return (unsigned short)(sign | (bit_cast<unsigned>(bit_cast<float>(x) + 0.5f) - 0x3f000000));
    return (unsigned short)(sign | ((x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13));
}

CUDA_CPU_INLINE float half_value(unsigned short bits) {
    unsigned sign = (unsigned)(bits & 0x8000) << 16, x = (unsigned)(bits & 0x7fff) << 13;
    if (x >= 0x0f800000) return bit_cast<float>(sign | (x + 0x70000000));
    if (x >= 0x00800000) return bit_cast<float>(sign | (x + 0x38000000));
    return bit_cast<float>(sign | bit_cast<unsigned>(bit_cast<float>(x + 0x38800000) - bit_cast<float>(0x38800000u)));
}

CUDA_CPU_INLINE unsigned short bfloat_bits(float value) {
    unsigned x = bit_cast<unsigned>(value);
    if ((x & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (unsigned short)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

CUDA_CPU_INLINE float bfloat_value(unsigned short bits) { return bit_cast<float>((unsigned)bits << 16); }
}  // namespace cuda_cpu

struct __half_raw { unsigned short x; };
struct __nv_bfloat16_raw { unsigned short x; };

#define CUDA_CPU_SMALL_FLOAT(T, Raw, encode, decode)                                                              \
    struct __attribute__((aligned(2))) T {                                                                        \
        unsigned short __x;                                                                                       \
        T() = default;                                                                                            \
        CUDA_CPU_MEMBER T(float v) : __x(cuda_cpu::encode(v)) {}                                                  \
        CUDA_CPU_MEMBER T(double v) : __x(cuda_cpu::encode(cuda_cpu::round_to_odd(v))) {}                         \
        CUDA_CPU_MEMBER T(int v) : T((double)v) {}                                                                \
        CUDA_CPU_MEMBER T(unsigned v) : T((double)v) {}                                                           \
        CUDA_CPU_MEMBER T(short v) : T((double)v) {}                                                              \
        CUDA_CPU_MEMBER T(unsigned short v) : T((double)v) {}                                                     \
        CUDA_CPU_MEMBER T(long v) : T((float)v) {}                                                                \
        CUDA_CPU_MEMBER T(unsigned long v) : T((float)v) {}                                                       \
        CUDA_CPU_MEMBER T(long long v) : T((float)v) {}                                                           \
        CUDA_CPU_MEMBER T(unsigned long long v) : T((float)v) {}                                                  \
        CUDA_CPU_MEMBER T(Raw r) : __x(r.x) {}                                                                    \
        CUDA_CPU_MEMBER operator Raw() const { return {__x}; }                                                    \
        CUDA_CPU_MEMBER operator float() const { return cuda_cpu::decode(__x); }                                  \
        CUDA_CPU_MEMBER explicit operator bool() const { return (__x & 0x7fff) != 0; }                            \
        template <class N> CUDA_CPU_MEMBER T& operator=(N v) { return *this = T(v); }                             \
        T& operator=(const T&) = default;                                                                         \
        T(const T&) = default;                                                                                    \
    };                                                                                                            \
    CUDA_CPU_INLINE T operator+(T a, T b) { return T((float)a + (float)b); }                                      \
    CUDA_CPU_INLINE T operator-(T a, T b) { return T((float)a - (float)b); }                                      \
    CUDA_CPU_INLINE T operator*(T a, T b) { return T((float)a * (float)b); }                                      \
    CUDA_CPU_INLINE T operator/(T a, T b) { return T((float)a / (float)b); }                                      \
    CUDA_CPU_INLINE T& operator+=(T& a, T b) { return a = a + b; }                                                \
    CUDA_CPU_INLINE T& operator-=(T& a, T b) { return a = a - b; }                                                \
    CUDA_CPU_INLINE T& operator*=(T& a, T b) { return a = a * b; }                                                \
    CUDA_CPU_INLINE T& operator/=(T& a, T b) { return a = a / b; }                                                \
    CUDA_CPU_INLINE T operator-(T a) { return T(-(float)a); }                                                     \
    CUDA_CPU_INLINE T operator+(T a) { return a; }                                                                \
    CUDA_CPU_INLINE bool operator==(T a, T b) { return (float)a == (float)b; }                                    \
    CUDA_CPU_INLINE bool operator!=(T a, T b) { return (float)a != (float)b; }                                    \
    CUDA_CPU_INLINE bool operator<(T a, T b) { return (float)a < (float)b; }                                      \
    CUDA_CPU_INLINE bool operator>(T a, T b) { return (float)a > (float)b; }                                      \
    CUDA_CPU_INLINE bool operator<=(T a, T b) { return (float)a <= (float)b; }                                    \
    CUDA_CPU_INLINE bool operator>=(T a, T b) { return (float)a >= (float)b; }                                    \
    struct __attribute__((aligned(4))) T##2 {                                                                     \
        T x, y;                                                                                                   \
        T##2() = default;                                                                                         \
        CUDA_CPU_MEMBER T##2(T x, T y) : x(x), y(y) {}                                                            \
    };                                                                                                            \
    CUDA_CPU_INLINE T##2 operator+(T##2 a, T##2 b) { return {a.x + b.x, a.y + b.y}; }                             \
    CUDA_CPU_INLINE T##2 operator-(T##2 a, T##2 b) { return {a.x - b.x, a.y - b.y}; }                             \
    CUDA_CPU_INLINE T##2 operator*(T##2 a, T##2 b) { return {a.x * b.x, a.y * b.y}; }                             \
    CUDA_CPU_INLINE T##2 operator/(T##2 a, T##2 b) { return {a.x / b.x, a.y / b.y}; }                             \
    CUDA_CPU_INLINE T##2& operator+=(T##2& a, T##2 b) { return a = a + b; }                                       \
    CUDA_CPU_INLINE T##2& operator-=(T##2& a, T##2 b) { return a = a - b; }                                       \
    CUDA_CPU_INLINE T##2& operator*=(T##2& a, T##2 b) { return a = a * b; }                                       \
    CUDA_CPU_INLINE T##2& operator/=(T##2& a, T##2 b) { return a = a / b; }                                       \
    CUDA_CPU_INLINE T##2 operator-(T##2 a) { return {-a.x, -a.y}; }                                               \
    CUDA_CPU_INLINE bool operator==(T##2 a, T##2 b) { return a.x == b.x && a.y == b.y; }                          \
    CUDA_CPU_INLINE bool operator!=(T##2 a, T##2 b) { return !(a == b); }                                         \
    /* One product and one sum, rounded once: the product of two 16-bit floats is exact in double. */             \
    CUDA_CPU_INLINE T __hfma(T a, T b, T c) { return T((double)(float)a * (double)(float)b + (double)(float)c); } \
    CUDA_CPU_INLINE T __hadd(T a, T b) { return a + b; }                                                          \
    CUDA_CPU_INLINE T __hsub(T a, T b) { return a - b; }                                                          \
    CUDA_CPU_INLINE T __hmul(T a, T b) { return a * b; }                                                          \
    CUDA_CPU_INLINE T __hdiv(T a, T b) { return a / b; }                                                          \
    CUDA_CPU_INLINE T __hadd_rn(T a, T b) { return a + b; }                                                       \
    CUDA_CPU_INLINE T __hmul_rn(T a, T b) { return a * b; }                                                       \
    CUDA_CPU_INLINE T __hadd_sat(T a, T b) { return T(__saturatef((float)a + (float)b)); }                        \
    CUDA_CPU_INLINE T __hmul_sat(T a, T b) { return T(__saturatef((float)a * (float)b)); }                        \
    CUDA_CPU_INLINE T __hfma_relu(T a, T b, T c) { T r = __hfma(a, b, c); return r < T(0) ? T(0) : r; }           \
    CUDA_CPU_INLINE T __hneg(T a) { return -a; }                                                                  \
    CUDA_CPU_INLINE T __habs(T a) { return T(fabsf((float)a)); }                                                  \
    CUDA_CPU_INLINE T __hmax(T a, T b) { return T(fmaxf((float)a, (float)b)); }                                   \
    CUDA_CPU_INLINE T __hmin(T a, T b) { return T(fminf((float)a, (float)b)); }                                   \
    CUDA_CPU_INLINE bool __heq(T a, T b) { return a == b; }                                                       \
    CUDA_CPU_INLINE bool __hne(T a, T b) { return a != b; }                                                       \
    CUDA_CPU_INLINE bool __hlt(T a, T b) { return a < b; }                                                        \
    CUDA_CPU_INLINE bool __hle(T a, T b) { return a <= b; }                                                       \
    CUDA_CPU_INLINE bool __hgt(T a, T b) { return a > b; }                                                        \
    CUDA_CPU_INLINE bool __hge(T a, T b) { return a >= b; }                                                       \
    CUDA_CPU_INLINE bool __hisnan(T a) { return (float)a != (float)a; }                                           \
    CUDA_CPU_INLINE int __hisinf(T a) { return isinf((float)a) ? ((float)a > 0 ? 1 : -1) : 0; }                   \
    CUDA_CPU_INLINE T##2 __hadd2(T##2 a, T##2 b) { return a + b; }                                                \
    CUDA_CPU_INLINE T##2 __hsub2(T##2 a, T##2 b) { return a - b; }                                                \
    CUDA_CPU_INLINE T##2 __hmul2(T##2 a, T##2 b) { return a * b; }                                                \
    CUDA_CPU_INLINE T##2 __h2div(T##2 a, T##2 b) { return a / b; }                                                \
    CUDA_CPU_INLINE T##2 __hneg2(T##2 a) { return -a; }                                                           \
    CUDA_CPU_INLINE T##2 __habs2(T##2 a) { return {__habs(a.x), __habs(a.y)}; }                                   \
    CUDA_CPU_INLINE T##2 __hmax2(T##2 a, T##2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                 \
    CUDA_CPU_INLINE T##2 __hmin2(T##2 a, T##2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                 \
    CUDA_CPU_INLINE T##2 __hfma2(T##2 a, T##2 b, T##2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    CUDA_CPU_INLINE T##2 __lows2##T##2(T##2 a, T##2 b) { return {a.x, b.x}; }                                     \
    CUDA_CPU_INLINE T hexp(T a) { return T(expf((float)a)); }                                                     \
    CUDA_CPU_INLINE T hexp2(T a) { return T(exp2f((float)a)); }                                                   \
    CUDA_CPU_INLINE T hexp10(T a) { return T(exp10f((float)a)); }                                                 \
    CUDA_CPU_INLINE T hlog(T a) { return T(logf((float)a)); }                                                     \
    CUDA_CPU_INLINE T hlog2(T a) { return T(log2f((float)a)); }                                                   \
    CUDA_CPU_INLINE T hlog10(T a) { return T(log10f((float)a)); }                                                 \
    CUDA_CPU_INLINE T hsqrt(T a) { return T(sqrtf((float)a)); }                                                   \
    CUDA_CPU_INLINE T hrsqrt(T a) { return T(rsqrtf((float)a)); }                                                 \
    CUDA_CPU_INLINE T hrcp(T a) { return T(1.0f / (float)a); }                                                    \
    CUDA_CPU_INLINE T hsin(T a) { return T(sinf((float)a)); }                                                     \
    CUDA_CPU_INLINE T hcos(T a) { return T(cosf((float)a)); }                                                     \
    CUDA_CPU_INLINE T htanh(T a) { return T(tanhf((float)a)); }                                                   \
    CUDA_CPU_INLINE T hfloor(T a) { return T(floorf((float)a)); }                                                 \
    CUDA_CPU_INLINE T hceil(T a) { return T(ceilf((float)a)); }                                                   \
    CUDA_CPU_INLINE T hrint(T a) { return T(rintf((float)a)); }                                                   \
    CUDA_CPU_INLINE T htrunc(T a) { return T(truncf((float)a)); }                                                 \
    CUDA_CPU_INLINE T##2 h2exp(T##2 a) { return {hexp(a.x), hexp(a.y)}; }                                         \
    CUDA_CPU_INLINE T##2 h2log(T##2 a) { return {hlog(a.x), hlog(a.y)}; }                                         \
    CUDA_CPU_INLINE T##2 h2sqrt(T##2 a) { return {hsqrt(a.x), hsqrt(a.y)}; }                                      \
    CUDA_CPU_INLINE T##2 h2rsqrt(T##2 a) { return {hrsqrt(a.x), hrsqrt(a.y)}; }                                   \
    CUDA_CPU_INLINE T##2 h2rcp(T##2 a) { return {hrcp(a.x), hrcp(a.y)}; }

CUDA_CPU_SMALL_FLOAT(__half, __half_raw, half_bits, half_value)
CUDA_CPU_SMALL_FLOAT(__nv_bfloat16, __nv_bfloat16_raw, bfloat_bits, bfloat_value)
#undef CUDA_CPU_SMALL_FLOAT

// With a number of another type the 16-bit type wins only where CUDA's own overloads say so: `half` with `float` is float.
#define CUDA_CPU_MIXED(T, op)                                                         \
    CUDA_CPU_INLINE float operator op(T a, float b) { return (float)a op b; }         \
    CUDA_CPU_INLINE float operator op(float a, T b) { return a op(float) b; }         \
    CUDA_CPU_INLINE double operator op(T a, double b) { return (float)a op b; }       \
    CUDA_CPU_INLINE double operator op(double a, T b) { return a op(float) b; }       \
    CUDA_CPU_INLINE float operator op(T a, int b) { return (float)a op(float) b; }    \
    CUDA_CPU_INLINE float operator op(int a, T b) { return (float)a op(float) b; }
#define CUDA_CPU_MIXED_COMPARISON(T, op)                                              \
    CUDA_CPU_INLINE bool operator op(T a, float b) { return (float)a op b; }          \
    CUDA_CPU_INLINE bool operator op(float a, T b) { return a op(float) b; }          \
    CUDA_CPU_INLINE bool operator op(T a, double b) { return (float)a op b; }         \
    CUDA_CPU_INLINE bool operator op(double a, T b) { return a op(float) b; }         \
    CUDA_CPU_INLINE bool operator op(T a, int b) { return (float)a op(float) b; }     \
    CUDA_CPU_INLINE bool operator op(int a, T b) { return (float)a op(float) b; }
#define CUDA_CPU_MIXED_ALL(T)                                                                               \
    CUDA_CPU_MIXED(T, +) CUDA_CPU_MIXED(T, -) CUDA_CPU_MIXED(T, *) CUDA_CPU_MIXED(T, /)                      \
    CUDA_CPU_MIXED_COMPARISON(T, <) CUDA_CPU_MIXED_COMPARISON(T, >) CUDA_CPU_MIXED_COMPARISON(T, <=)         \
    CUDA_CPU_MIXED_COMPARISON(T, >=) CUDA_CPU_MIXED_COMPARISON(T, ==) CUDA_CPU_MIXED_COMPARISON(T, !=)
CUDA_CPU_MIXED_ALL(__half)
CUDA_CPU_MIXED_ALL(__nv_bfloat16)
#undef CUDA_CPU_MIXED_ALL
#undef CUDA_CPU_MIXED_COMPARISON
#undef CUDA_CPU_MIXED

typedef __half half;
typedef __half2 half2;
typedef __half nv_half;
typedef __half2 nv_half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// Conversions. Suffixes other than `_rn` round as they say only where nothing is lost; nobody's kernel depends on it.
CUDA_CPU_INLINE __half __float2half(float x) { return __half(x); }
CUDA_CPU_INLINE __half __float2half_rn(float x) { return __half(x); }
CUDA_CPU_INLINE __half __double2half(double x) { return __half(x); }
CUDA_CPU_INLINE float __half2float(__half x) { return x; }
CUDA_CPU_INLINE __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
CUDA_CPU_INLINE __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
CUDA_CPU_INLINE __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
CUDA_CPU_INLINE float2 __half22float2(__half2 v) { return {(float)v.x, (float)v.y}; }
CUDA_CPU_INLINE __half2 __half2half2(__half x) { return {x, x}; }
CUDA_CPU_INLINE __half2 __halves2half2(__half x, __half y) { return {x, y}; }
CUDA_CPU_INLINE __half2 make_half2(__half x, __half y) { return {x, y}; }
CUDA_CPU_INLINE __half __low2half(__half2 v) { return v.x; }
CUDA_CPU_INLINE __half __high2half(__half2 v) { return v.y; }
CUDA_CPU_INLINE float __low2float(__half2 v) { return v.x; }
CUDA_CPU_INLINE float __high2float(__half2 v) { return v.y; }
CUDA_CPU_INLINE __half2 __lowhigh2highlow(__half2 v) { return {v.y, v.x}; }
CUDA_CPU_INLINE int __half2int_rn(__half x) { return __float2int_rn(x); }
CUDA_CPU_INLINE int __half2int_rz(__half x) { return __float2int_rz(x); }
CUDA_CPU_INLINE __half __int2half_rn(int x) { return __half(x); }
CUDA_CPU_INLINE __half __uint2half_rn(unsigned x) { return __half(x); }
CUDA_CPU_INLINE short __half_as_short(__half x) { return (short)x.__x; }
CUDA_CPU_INLINE unsigned short __half_as_ushort(__half x) { return x.__x; }
CUDA_CPU_INLINE __half __short_as_half(short x) { return __half(__half_raw{(unsigned short)x}); }
CUDA_CPU_INLINE __half __ushort_as_half(unsigned short x) { return __half(__half_raw{x}); }
CUDA_CPU_INLINE __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
CUDA_CPU_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
CUDA_CPU_INLINE __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
CUDA_CPU_INLINE float __bfloat162float(__nv_bfloat16 x) { return x; }
CUDA_CPU_INLINE __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
CUDA_CPU_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
CUDA_CPU_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
CUDA_CPU_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return {(float)v.x, (float)v.y}; }
CUDA_CPU_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
CUDA_CPU_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
CUDA_CPU_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
CUDA_CPU_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
CUDA_CPU_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
CUDA_CPU_INLINE float __low2float(__nv_bfloat162 v) { return v.x; }
CUDA_CPU_INLINE float __high2float(__nv_bfloat162 v) { return v.y; }
CUDA_CPU_INLINE int __bfloat162int_rn(__nv_bfloat16 x) { return __float2int_rn(x); }
CUDA_CPU_INLINE __nv_bfloat16 __int2bfloat16_rn(int x) { return __nv_bfloat16(x); }
CUDA_CPU_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
CUDA_CPU_INLINE short __bfloat16_as_short(__nv_bfloat16 x) { return (short)x.__x; }
CUDA_CPU_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16(__nv_bfloat16_raw{x}); }
