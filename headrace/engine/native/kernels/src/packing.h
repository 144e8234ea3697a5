// Weights [n, k] in the panels of product.h, and activations in blocks.
//
// Activations lie in blocks of 32 rows by 32 columns, block rows after one another: [rows / 32][columns / 32][32][32]. A block is
// contiguous whether bf16 or float32, so tiles load and store in one piece and the result of a product is the input of the next.
#pragma once
#include "product.h"

// Packs one panel. rows[j] is the row of `w` [?, k] that becomes output j; -1 and what lies behind n_out are zeros.
static inline void pack_panel(const bf16* w, int k, const int32_t* rows, int n_out, int panel, bf16* packed) {
    static const bf16 nothing[SIDE] = {};
    bf16* out = packed + (size_t)panel * up(k) * AREA;
    for (int step = 0; step < up(k); step++)
        for (int tile = 0; tile < 2; tile++, out += 512)
            for (int j = 0; j < 16; j++) {
                int output = panel * SIDE + tile * 16 + j, inputs = std::min(SIDE, k - step * SIDE);
                int row = output < n_out ? rows[output] : -1;
                bf16 part[SIDE] = {};
                const bf16* from = row < 0 ? nothing : w + (size_t)row * k + step * SIDE;
                if (row >= 0 && inputs < SIDE) from = (const bf16*)std::memcpy(part, from, inputs * 2);
                for (int pair = 0; pair < 16; pair++) std::memcpy(out + (pair * 16 + j) * 2, from + pair * 2, 4);
            }
}
