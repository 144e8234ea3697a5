// Products with float32 sums, in blocks of 32 by 32, for the engine and the trainer, on every kind of processor.
//
// The first operand is rows, as they lie in memory or in blocks of [32 rows][32 columns]. The second is packed once in panels of
// 32 outputs; a panel is a list of steps of 32 inputs. In bf16 a step is two tiles (16 outputs each) of [16 pairs of
// inputs][16 outputs][2]: AMX multiplies by tiles, AVX512-BF16 by pairs, and a pair is two vectors of float32 after a shift and
// a mask. In float32 a step is [32 inputs][32 outputs]. Codes of eight bits (the engine's quantised weights) are integers that are
// multiplied as they are, and whoever calls multiplies the sums by a scale: a step is two tiles of [32 inputs][16 outputs], or, where
// rows are bf16, laid out as its tiles are. All codes are numbers of bf16, so that no kind of processor rounds them.
//
// Each sum runs over the inputs in the same order for any number of rows: a row's result does not depend on its batch.
//
// `tier_*.h` hold the code for one kind of processor each; the best that the compiler's target allows is used.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "vec.h"

using code = int8_t;
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
    size_t next = std::is_same<T, code>::value ? 16 : SIDE;   // from a pair of inputs, in float32 and codes from an input, to the next
    size_t beside = std::is_same<T, float>::value ? 16 : 512;  // from 16 outputs to the next 16
    // Set for a panel that is in no cache: what is read after it. Prefetched while it is multiplied are the rest of the panel and the
    // beginning of this; or, if `lines` is set because it was prefetched before, so many lines of 64 bytes of this with each step.
    const T* then = nullptr;
    int lines = 0;
};

// Each tier defines TIER, its name, and
//     multiply<ADD>(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows)
// for X and W of bf16 or float32, and for X of float32 and codes: c [rows, 32], rows `ld` floats apart, is x [rows, steps * 32] times a panel, added to the
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

// Rows of bf16 times codes: a few steps of them become bf16, which stays in the first-level cache.
template <bool ADD>
static inline void multiply(Inputs<bf16> x, Panel<code> w, int steps, float* c, size_t ld, int rows) {
    constexpr int FEWER = 8;
    alignas(64) bf16 wide[FEWER * AREA];
    for (int s = 0; s < steps; s += FEWER, x.data += FEWER * x.step, w.data += FEWER * AREA) {
        const int some = std::min(FEWER, steps - s);
        const bool last = s + some == steps;
        for (int i = 0; i < some * AREA; i += 16) {
            if (i % 64 == 0 && (!last || w.then)) __builtin_prefetch((last ? w.then : w.data + FEWER * AREA) + i, 0, 3);
            narrow(wide + i, of_codes(w.data + i));
        }
        if (ADD || s) multiply<true>(x, Panel<bf16>{wide}, some, c, ld, rows);
        else multiply<false>(x, Panel<bf16>{wide}, some, c, ld, rows);
    }
}

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

// A panel is read again for every 32 rows. A piece of PIECE steps of it fits into the first-level cache beside rows and sums. The first
// block of rows prefetches the rest of the panel; more than FEW blocks leave time to prefetch all of the next one.
constexpr int FEW = 2;
#if !defined(PIECE)
constexpr int PIECE = 1 << 30;
#endif

// n rows times one panel, in pieces: from(b) are the inputs of 32 rows, into(b) their sums, whose rows are `ld` floats apart.
template <bool ADD, class W, class From, class Into>
static inline void multiply_rows(int n, Panel<W> w, int steps, size_t ld, const From& from, const Into& into) {
    constexpr int LINE = 64 / sizeof(W);
    const int blocks = up(n);
    const bool far = w.then && blocks > FEW;
    if (far) w.lines = (AREA / LINE + blocks - 1) / blocks;
    for (int parts = (steps - 1) / PIECE + 1, first = 0, length; parts; parts--, first += length) {
        length = (steps - first + parts - 1) / parts;
        for (int b = 0; b < blocks; b++) {
            auto x = from(b);
            Panel<W> piece = w;
            x.data += first * x.step, piece.data += first * w.apart;
            if (!far && w.then) piece.then = b ? nullptr : parts > 1 ? piece.data + length * w.apart : w.then;
            if (ADD || first) multiply<true>(x, piece, length, into(b), ld, std::min(SIDE, n - b * SIDE));
            else multiply<false>(x, piece, length, into(b), ld, std::min(SIDE, n - b * SIDE));
            w.then += (size_t)length * w.lines * LINE;
        }
    }
}

#if !defined(VISIBLE)
static inline bool tiles_allowed() { return true; }
static inline void tiles_begin() {}
static inline void tiles_end() {}
#endif
