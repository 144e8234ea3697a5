// Products with float32 sums, in blocks of 32 by 32, for the engine and the trainer, on every kind of processor.
//
// The first operand is rows, as they lie in memory or in blocks of [32 rows][32 columns]. The second is packed once in panels of
// 32 outputs; a panel is a list of steps of 32 inputs. In bf16 a step is two tiles (16 outputs each) of [16 pairs of
// inputs][16 outputs][2]: AMX multiplies by tiles, AVX512-BF16 by pairs, and a pair is two vectors of float32 after a shift and
// a mask. In float32 a step is [32 inputs][32 outputs].
//
// Each sum runs over the inputs in the same order for any number of rows: a row's result does not depend on its batch.
//
// `tier_*.h` hold the code for one kind of processor each; the best that the compiler's target allows is used.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "vec.h"

constexpr int SIDE = 32, AREA = SIDE * SIDE;
static inline int up(int n) { return (n + SIDE - 1) / SIDE; }

template <class T>
struct Inputs {
    const T* data;
    size_t row = SIDE, step = AREA;  // from a row to the next, and from 32 inputs to the next 32: blocks unless given
};

template <class T>
struct Panel {
    const T* data;
    size_t apart = AREA;                                      // from a step to the next
    size_t next = SIDE;                                       // from a pair of inputs, in float32 from an input, to the next
    size_t beside = std::is_same<T, bf16>::value ? 512 : 16;  // from 16 outputs to the next 16
    // Set for a panel that is in no cache: what is read after it. The rest of the panel is prefetched while it is multiplied, and then
    // the beginning of this.
    const T* then = nullptr;
};

// Each tier defines TIER, its name, and
//     multiply<ADD>(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows)
// for X and W of bf16 or float32: c [rows, 32], rows `ld` floats apart, is x [rows, steps * 32] times a panel, added to the
// content of c if ADD. At most 32 rows; x and c must have room for 16 rows, or for 32 if there are more than 16: AMX computes
// them all.
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#include "tier_amx.h"
#elif defined(__AVX512BF16__) && defined(__AVX512F__)
#include "tier_avx512_bf16.h"
#elif defined(__AVX512F__)
#include "tier_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "tier_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "tier_neon.h"
#else
#include "tier_portable.h"
#endif

// Whether this processor has the instructions that the tier was compiled for.
static inline bool executable() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(__AVX512BF16__)
    if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512f")) return false;
#endif
#if defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2")) return false;
#endif
#endif
    return true;
}

#if !defined(VISIBLE)
static inline bool tiles_allowed() { return true; }
static inline void tiles_begin() {}
static inline void tiles_end() {}
#endif
