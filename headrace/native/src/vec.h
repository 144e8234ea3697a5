// Sixteen floats at a time: one register of AVX-512, several of AVX2 and NEON.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using bf16 = uint16_t;

#define UNROLLED_4 _Pragma("GCC unroll 4")

// f16x, i16x and u16x are sixteen numbers each, with the operators of C; select chooses by lanes; bits_of and keep_low take and store
// sixteen numbers of 16 bits, of_codes and keep_codes of 8; some_codes takes a register's.
#if defined(__AVX512F__)
#define INLINED static inline __attribute__((always_inline))
typedef float f16x __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16x __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16x __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16x __attribute__((vector_size(32), aligned(2)));
INLINED f16x load(const float* p) { return *(const f16x*)p; }
INLINED void store(float* p, f16x v) { *(f16x*)p = v; }
INLINED u16x bits_of(const uint16_t* p) { return __builtin_convertvector(*(const h16x*)p, u16x); }
INLINED void keep_low(uint16_t* p, u16x v) { *(h16x*)p = __builtin_convertvector(v, h16x); }
INLINED f16x some_codes(const int8_t* p) { return (f16x)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
INLINED f16x of_codes(const int8_t* p) { return some_codes(p); }
INLINED void keep_codes(int8_t* p, i16x v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }
template <class V>
INLINED V select(i16x mask, V yes, V no) { return mask ? yes : no; }
INLINED i16x count16() { return i16x{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
#else
#include "wide.h"
#endif

// Memory on large pages if the system has them. A pass reads far more memory than the translation caches cover, and in a
// virtual machine a miss in them costs several times a miss of the data (measured: 1.8 us against 0.36 for a random read).
struct Arena {
    static constexpr size_t PAGE = 2 << 20;
    char* data = nullptr;
    size_t size = 0;
    Arena() = default;
    Arena(const Arena&) = delete;
    ~Arena() { std::free(data); }

    // At least `wanted` bytes of zeros; the old content is lost if it must grow.
    void grow(size_t wanted) {
        if (wanted <= size) return;
        std::free(data);
        size = (wanted + PAGE - 1) / PAGE * PAGE;
        data = (char*)std::aligned_alloc(PAGE, size);
        if (!data) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        madvise(data, size, MADV_HUGEPAGE);
#endif
        std::memset(data, 0, size);
    }
};

// Prefetches lines of memory that will be read soon.
static inline void fetch(const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 3);
}

INLINED f16x splat(float x) { return f16x{} + x; }
INLINED f16x widen(const bf16* p) { return (f16x)(bits_of(p) << 16); }
static inline float widen1(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Rounds to nearest even, as torch does. NaN stays NaN.
INLINED void narrow(bf16* p, f16x v) {
#if defined(__AVX512BF16__)
    *(h16x*)p = (h16x)_mm512_cvtneps_pbh((__m512)v);
#else
    u16x bits = (u16x)v;
    u16x rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    keep_low(p, select(v != v, (bits >> 16) | 0x40, rounded));
#endif
}
static inline bf16 narrow1(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// bf16 or float32, as float32.
INLINED f16x read(const float* p) { return load(p); }
INLINED f16x read(const bf16* p) { return widen(p); }
INLINED void write(float* p, f16x v) { store(p, v); }
INLINED void write(bf16* p, f16x v) { narrow(p, v); }
static inline float read1(const float* p) { return *p; }
static inline float read1(const bf16* p) { return widen1(*p); }
static inline void write1(float* p, float v) { *p = v; }
static inline void write1(bf16* p, float v) { *p = narrow1(v); }

INLINED f16x max16(f16x a, f16x b) { return select(a > b, a, b); }  // NaN in a gives b
#if defined(__AVX512F__)
INLINED float sum(f16x v) { return _mm512_reduce_add_ps((__m512)v); }
INLINED float largest(f16x v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINED float sum(f16x v) {
    return folded(v, [](auto a, auto b) { return a + b; });
}
INLINED float largest(f16x v) {
    return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}
#endif

// The same of four at once. Each number's order of sums is that of `sum`.
#if defined(__AVX512F__)
template <class F>
INLINED void folded4(const f16x* v, float* into, const F& f) {
    const auto halves = [&](f16x a, f16x b) {
        return f(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44), _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
    };
    const __m512 low = halves(v[0], v[1]), high = halves(v[2], v[3]);  // each number's quarters, in pairs
    __m512 all = f(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));  // a quarter of each
    all = f(all, _mm512_permute_ps(all, 0x4e));
    all = f(all, _mm512_permute_ps(all, 0xb1));
    const __m512i first = _mm512_set_epi32(12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0);
    _mm_storeu_ps(into, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, all)));
}
INLINED void sum4(const f16x* v, float* into) {
    folded4(v, into, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
INLINED void largest4(const f16x* v, float* into) {
    folded4(v, into, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
#else
INLINED void sum4(const f16x* v, float* into) {
    for (int i = 0; i < 4; i++) into[i] = sum(v[i]);
}
INLINED void largest4(const f16x* v, float* into) {
    for (int i = 0; i < 4; i++) into[i] = largest(v[i]);
}
#endif

// Stores two adjacent sixteens to lines of memory that nobody reads soon: they are not read before they are overwritten, which took 13 %
// of a product in float32. `streamed` ends a thread's stores, before it tells others.
INLINED void stream(float* p, f16x first, f16x second) {
#if defined(__AVX2__)
    if ((uintptr_t)p % 64 == 0) {
        alignas(64) float both[32];
        store(both, first), store(both + 16, second);
#if defined(__AVX512F__)
        for (int i = 0; i < 32; i += 16) _mm512_stream_ps(p + i, _mm512_load_ps(both + i));
#else
        for (int i = 0; i < 32; i += 8) _mm256_stream_ps(p + i, _mm256_load_ps(both + i));
#endif
        return;
    }
#endif
    store(p, first), store(p + 16, second);
}
INLINED void stream(bf16* p, f16x first, f16x second) { write(p, first), write(p + 16, second); }
INLINED void streamed() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// While one exists, denormal float32 numbers are zeros in this thread. exp of masked scores gives thousands of them,
// and the processor takes 150 cycles for each: attention over half-filled blocks was ten times slower.
struct NoDenormals {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
#endif
};

// Lanes whose place, counted from `first`, lies in [from, to); minus infinity elsewhere.
INLINED f16x within(f16x v, int first, int from, int to) {
    const i16x place = count16() + first;
    return select((place >= from) & (place < to), v, splat(-INFINITY));
}

// 2^x to about 1e-7 relative: x = n + f with |f| <= 1/2, a polynomial in f. Below -126 it is zero; NaN stays NaN.
INLINED f16x exp2_16(f16x x) {
#if defined(__AVX512F__)
    x = (f16x)_mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x);
    f16x n = (f16x)_mm512_roundscale_ps((__m512)x, 0), f = x - n;
#else
    const f16x magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    f16x clamped = select(x < -126.f, splat(-126.f), x);
    f16x t = clamped + magic, f = clamped - (t - magic);
    i16x n = (i16x)t - (i16x)magic;
#endif
    f16x p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
#if defined(__AVX512F__)
    return (f16x)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    f16x r = (f16x)((i16x)p + (n << 23));
    return select(x < -126.f, f16x{}, r);
#endif
}

// x * by - from, rounded once where the processor can.
INLINED f16x difference(f16x x, float by, float from) {
#if defined(__AVX512F__)
    return (f16x)_mm512_fmsub_ps((__m512)x, _mm512_set1_ps(by), _mm512_set1_ps(from));
#else
    return x * by - from;
#endif
}

// 2^x, not larger than about one, as a number that is rounded to bf16 next (to 8e-5 relative, where 2e-3 is half of its last bit) or
// not. The last argument only tells which. Where x is minus infinity it is zero.
INLINED f16x weight_of(f16x x, const float*) { return exp2_16(x); }
INLINED f16x weight_of(f16x x, const bf16*) {
#if defined(__AVX512DQ__)
    const f16x f = (f16x)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    f16x p = splat(7.80245215e-2f);
    p = p * f + 2.26067156e-1f;
    p = p * f + 6.95833564e-1f;
    p = p * f + 9.99925196e-1f;
    return (f16x)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
#else
    return exp2_16(x);
#endif
}

// 1/x to about 1e-7 relative.
INLINED f16x inverse(f16x x) {
#if defined(__AVX512F__)
    f16x r = (f16x)_mm512_rcp14_ps((__m512)x);
    return r * (2.f - x * r);
#else
    return 1.f / x;
#endif
}
INLINED f16x exp16(f16x x) { return exp2_16(x * 1.44269504f); }
