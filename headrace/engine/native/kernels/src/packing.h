// Weights [n, k] in the panels of product.h, and activations in blocks.
//
// Activations lie in blocks of 32 rows by 32 columns, block rows after one another: [rows / 32][columns / 32][32][32]. A block is
// contiguous whether bf16 or float32, so tiles load and store in one piece and the result of a product is the input of the next.
#pragma once
#include "product.h"

// Weights and cache are stored in bf16, or (with -DWIDE) in float32. The other operand of a product is bf16 too if the
// processor has an instruction for it; otherwise it stays float32, which costs nothing there and rounds less.
#if defined(WIDE)
using stored = float;
#else
using stored = bf16;
#endif
constexpr int PAIR = sizeof(float) / sizeof(stored);
using taken = std::conditional_t<PAIRS, stored, float>;
static inline stored kept(taken x) {
    if constexpr (std::is_same<stored, taken>::value) return x;
    else return narrow1(x);
}

// Packs one panel. rows[j] is the row of `w` [?, k] that becomes output j; -1 and outputs from n_out on are zeros.
static inline void pack_panel(const stored* w, int k, const int32_t* rows, int n_out, int panel, stored* packed) {
    static const stored nothing[SIDE] = {};
    const Panel<stored> layout = {};
    for (int step = 0; step < up(k); step++)
        for (int j = 0; j < SIDE; j++) {
            int output = panel * SIDE + j, inputs = std::min(SIDE, k - step * SIDE);
            int row = output < n_out ? rows[output] : -1;
            stored part[SIDE] = {};
            const stored* from = row < 0 ? nothing : w + (size_t)row * k + step * SIDE;
            if (row >= 0 && inputs < SIDE) from = (const stored*)std::memcpy(part, from, inputs * sizeof(stored));
            stored* to = packed + ((size_t)panel * up(k) + step) * AREA + j / 16 * layout.beside + j % 16 * PAIR;
            for (int i = 0; i < SIDE; i += PAIR) std::memcpy(to + i / PAIR * layout.next, from + i, 4);
        }
}
