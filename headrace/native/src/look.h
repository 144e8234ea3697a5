// Attention over blocks of KV cache, sixteen query rows at a time.
//
// A block holds 32 tokens of one key-value head: keys as [pairs of dimensions][32 tokens][2], values as [pairs of tokens][dim][2],
// so that both products read it as `product.h` reads weights. The head's size is rounded up to 32, with zeros.
//
// One block after the other, with a running maximum (online softmax: Milakov & Gimelshein, arXiv:1805.02867). A row's result
// depends on its own blocks alone and on their order, so it is the same alone, in a batch, in prefill and in decoding, and
// whether blocks that several sequences share are read once for all of them or once for each.
#pragma once
#include "product.h"

constexpr int ROWS = 16;
constexpr float LOWEST = -1e30f;

struct alignas(64) Queries {
    float peak[ROWS], total[ROWS];
    int from[ROWS], to[ROWS];  // positions [from, to) are seen
    int rows, dim;             // dim: rounded up to 32
    bf16* q;                   // [16, dim]
    float* out;                // [16, dim], to be divided by total

    void begin() {
        for (int r = 0; r < ROWS; r++) peak[r] = LOWEST, total[r] = 0;
        std::memset(out, 0, sizeof(float) * ROWS * dim);
    }

    // Goes on alone with some rows of `all`.
    void split(const Queries& all, int first, int count) {
        rows = count;
        for (int r = 0; r < count; r++) {
            peak[r] = all.peak[first + r], total[r] = all.total[first + r], from[r] = all.from[first + r], to[r] = all.to[first + r];
            std::memcpy(out + r * dim, all.out + (first + r) * dim, dim * sizeof(float));
            std::memcpy(q + r * dim, all.q + (first + r) * dim, dim * sizeof(bf16));
        }
    }
};

// All rows look at one block, whose first token is at position `first`. `scale`: of the scores, times log2(e).
static inline void look(Queries& a, const bf16* keys, const bf16* values, int first, float scale) {
    alignas(64) float s[ROWS * SIDE];
    alignas(64) bf16 weights[ROWS * SIDE];
    multiply<false>(Inputs<bf16>{a.q, (size_t)a.dim, SIDE}, Panel<bf16>{keys, AREA, 2 * SIDE, SIDE}, a.dim / SIDE, s, SIDE, a.rows);
    for (int r = 0; r < a.rows; r++) {
        f16x left = load(s + r * SIDE) * scale, right = load(s + r * SIDE + 16) * scale;
        if (first < a.from[r] || first + SIDE > a.to[r]) {
            left = within(left, first, a.from[r], a.to[r]);
            right = within(right, first + 16, a.from[r], a.to[r]);
        }
        float high = largest(max16(left, right));
        if (high > a.peak[r]) {
            f16x shrink = exp2_16(splat(a.peak[r] - high));
            a.total[r] *= shrink[0];
            for (int d = 0; d < a.dim; d += 16) store(a.out + r * a.dim + d, load(a.out + r * a.dim + d) * shrink);
            a.peak[r] = high;
        }
        left = exp2_16(left - a.peak[r]), right = exp2_16(right - a.peak[r]);
        a.total[r] += sum(left + right);
        narrow(weights + r * SIDE, left);
        narrow(weights + r * SIDE + 16, right);
    }
    for (int d = 0; d < a.dim; d += SIDE)
        multiply<true>(Inputs<bf16>{weights}, Panel<bf16>{values + d * 2, 0, (size_t)a.dim * 2, SIDE}, 1, a.out + d, a.dim, a.rows);
}
