// AVX512-BF16: an instruction adds the products of sixteen pairs of bf16 to sixteen sums.
#pragma once

#undef TIER
#define TIER "AVX512-BF16"
typedef float fvec __attribute__((vector_size(64), aligned(4)));
constexpr int TALL = 12, ACROSS = 2;  // 24 sums, 2 weights and an input
constexpr bool PAIRS = true;
#include "tile.h"

template <int R, class Soon>
INLINED void add_step(Sums<R>& sums, const bf16* x, size_t row, const bf16* w, size_t next, size_t beside, const Soon& soon) {
    for (int i = 0; i < SIDE; i += 2, w += next) {
        soon.input(w, beside);
        __m512bh weight[ACROSS];
        UNROLLED for (int v = 0; v < ACROSS; v++) weight[v] = (__m512bh)_mm512_loadu_si512(w + v * beside);
        UNROLLED for (int r = 0; r < R; r++) {
            int pair;
            std::memcpy(&pair, x + r * row + i, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] = (fvec)_mm512_dpbf16_ps((__m512)sums.at[r][v], both, weight[v]);
        }
    }
}
