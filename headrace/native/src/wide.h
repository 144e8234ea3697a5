// Sixteen numbers in several registers, for processors whose registers hold fewer.
//
// GCC has vectors of any width, but passes those that are wider than a register through memory, and compares them number by number:
// rounding sixteen floats to bf16 took 160 instructions on AVX2. Here each register is a vector of its own.
#pragma once
#include <cstdint>

#if defined(__AVX2__)
constexpr int REGISTER = 32;  // bytes
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = 64 / REGISTER;

#define ALWAYS inline __attribute__((always_inline))
#define INLINED static ALWAYS
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)
#define OPERATOR(OP)                                                          \
    ALWAYS friend Wide operator OP(Wide a, Wide b) {                          \
        EACH_PART a.at[i] = a.at[i] OP b.at[i];                               \
        return a;                                                             \
    }                                                                         \
    ALWAYS friend Wide operator OP(Wide a, T b) { return a OP all(b); }       \
    ALWAYS friend Wide operator OP(T a, Wide b) { return all(a) OP b; }       \
    ALWAYS friend Wide& operator OP##=(Wide& a, Wide b) { return a = a OP b; } \
    ALWAYS friend Wide& operator OP##=(Wide& a, T b) { return a = a OP b; }
#define COMPARISON(OP)                                                        \
    ALWAYS friend Wide<int32_t> operator OP(Wide a, Wide b) {                 \
        Wide<int32_t> mask;                                                   \
        EACH_PART mask.at[i] = a.at[i] OP b.at[i];                            \
        return mask;                                                          \
    }                                                                         \
    ALWAYS friend Wide<int32_t> operator OP(Wide a, T b) { return a OP all(b); }

template <class T>
struct Wide {
    static constexpr int LANES = REGISTER / sizeof(T);
    typedef T Part __attribute__((vector_size(REGISTER), aligned(4)));
    Part at[PARTS];

    static ALWAYS Wide all(T x) {
        Wide same;
        EACH_PART same.at[i] = Part{} + x;
        return same;
    }
    ALWAYS T operator[](int lane) const { return at[lane / LANES][lane % LANES]; }
    // The same bits, as numbers of another kind.
    template <class U>
    ALWAYS explicit operator Wide<U>() const {
        Wide<U> same;
        EACH_PART same.at[i] = (typename Wide<U>::Part)at[i];
        return same;
    }
    OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(<<) OPERATOR(>>)
    COMPARISON(<) COMPARISON(>) COMPARISON(>=) COMPARISON(!=)
    ALWAYS friend Wide operator-(Wide a) {
        EACH_PART a.at[i] = -a.at[i];
        return a;
    }
    ALWAYS friend Wide<int32_t> operator!(Wide a) {
        Wide<int32_t> mask;
        EACH_PART mask.at[i] = a.at[i] == 0;
        return mask;
    }
};
#undef OPERATOR
#undef COMPARISON

using f16x = Wide<float>;
using i16x = Wide<int32_t>;
using u16x = Wide<uint32_t>;

INLINED f16x load(const float* p) {
    f16x v;
    EACH_PART v.at[i] = *(const f16x::Part*)(p + i * f16x::LANES);
    return v;
}
INLINED void store(float* p, f16x v) { EACH_PART *(f16x::Part*)(p + i * f16x::LANES) = v.at[i]; }

typedef uint16_t Shorts __attribute__((vector_size(REGISTER / 2), aligned(2)));
INLINED u16x bits_of(const uint16_t* p) {
    u16x v;
    EACH_PART v.at[i] = __builtin_convertvector(*(const Shorts*)(p + i * u16x::LANES), u16x::Part);
    return v;
}
INLINED void keep_low(uint16_t* p, u16x v) {
#if defined(__AVX2__)
    const __m256i both = _mm256_packus_epi32((__m256i)v.at[0], (__m256i)v.at[1]);  // saturates: the numbers are of 16 bits
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
#else
    EACH_PART *(Shorts*)(p + i * u16x::LANES) = __builtin_convertvector(v.at[i], Shorts);
#endif
}
typedef int8_t Bytes __attribute__((vector_size(REGISTER / 4), aligned(1)));
INLINED f16x::Part some_codes(const int8_t* p) {
#if defined(__AVX2__)
    return (f16x::Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const Bytes*)p, i16x::Part), f16x::Part);
#endif
}
INLINED f16x of_codes(const int8_t* p) {
    f16x v;
    EACH_PART v.at[i] = some_codes(p + i * f16x::LANES);
    return v;
}
INLINED void keep_codes(int8_t* p, i16x v) {
#if defined(__AVX2__)
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.at[0], (__m256i)v.at[1]), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
#else
    EACH_PART *(Bytes*)(p + i * i16x::LANES) = __builtin_convertvector(v.at[i], Bytes);
#endif
}
template <class V>
INLINED V select(i16x mask, V yes, V no) {
    EACH_PART yes.at[i] = mask.at[i] ? yes.at[i] : no.at[i];
    return yes;
}
// 0 to 15.
INLINED i16x count16() {
    i16x v;
    EACH_PART for (int j = 0; j < i16x::LANES; j++) v.at[i][j] = i * i16x::LANES + j;
    return v;
}
// One number of all, by an operation of two: of the first half with the second, and so on, as AVX-512 does it.
template <class F>
INLINED float folded(f16x v, const F& f) {
    for (int n = PARTS / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v.at[i] = f(v.at[i], v.at[i + n]);
    f16x::Part all = v.at[0];
    for (int n = f16x::LANES / 2; n; n /= 2) all = f(all, __builtin_shuffle(all, count16().at[0] + n));
    return all[0];
}
