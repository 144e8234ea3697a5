// Attention over blocks of KV cache, sixteen query rows at a time.
//
// A block holds 32 tokens of one key-value head: in bf16 keys as [pairs of dimensions][32 tokens][2] and values as
// [pairs of tokens][dim][2], in float32 as [dim][32 tokens] and [32 tokens][dim], so that both products read it as `product.h` reads
// weights. The head's size is rounded up to 32, with zeros.
//
// Blocks are processed in order, with a running maximum (online softmax: Milakov & Gimelshein, arXiv:1805.02867). A row's result
// depends on its own blocks alone and on their order, so it is the same alone, in a batch, in prefill and in decoding, no
// matter whether blocks that several sequences share are read once for all of them or once for each.
#pragma once
#include "product.h"

constexpr int ROWS = 16;
constexpr float LOWEST = -1e30f;

template <class X>
struct alignas(64) Queries {
    float peak[ROWS], total[ROWS];
    int from[ROWS], to[ROWS];  // positions [from, to) are seen
    int rows, dim;             // dim: rounded up to 32
    X* q;                      // [16, dim]
    float* out;                // [16, dim], to be divided by total

    void begin() {
        for (int r = 0; r < ROWS; r++) peak[r] = LOWEST, total[r] = 0;
        std::memset(out, 0, sizeof(float) * ROWS * dim);
    }

    // Continues with some rows of `all` alone.
    void split(const Queries& all, int first, int count) {
        rows = count;
        for (int r = 0; r < count; r++) {
            peak[r] = all.peak[first + r], total[r] = all.total[first + r], from[r] = all.from[first + r], to[r] = all.to[first + r];
            std::memcpy(out + r * dim, all.out + (first + r) * dim, dim * sizeof(float));
            std::memcpy(q + r * dim, all.q + (first + r) * dim, dim * sizeof(X));
        }
    }
};

// All rows attend to one block of keys and values in W (bf16 or float32), whose first token is at position `first`. `scale`: the
// factor of the scores, times log2(e). `next`: the keys that are read after this block, if both are read from memory, or null.
template <class X, class W>
static inline void look(Queries<X>& a, const W* keys, const W* values, int first, float scale, const W* next = nullptr) {
    constexpr int PAIR = sizeof(float) / sizeof(W);
    Panel<W> scored = {keys, AREA, PAIR * SIDE, PAIR * 16};
    if (next) scored.then = values;
    alignas(64) float s[ROWS * SIDE];
    alignas(64) X weights[ROWS * SIDE];
    multiply<false>(Inputs<X>{a.q, (size_t)a.dim, SIDE}, scored, a.dim / SIDE, s, SIDE, a.rows);
    if (next) fetch(values + AREA, (a.dim - SIDE) * SIDE * sizeof(W));
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
        write(weights + r * SIDE, left);
        write(weights + r * SIDE + 16, right);
    }
    if (next) fetch(next, AREA * sizeof(W));
    for (int d = 0; d < a.dim; d += SIDE)
        multiply<true>(Inputs<X>{weights}, Panel<W>{values + d * PAIR, 0, (size_t)a.dim * PAIR, PAIR * 16}, 1, a.out + d, a.dim, a.rows);
}
