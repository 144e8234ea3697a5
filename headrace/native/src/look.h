// Attention over blocks of KV cache, thirty-two query rows at a time.
//
// A block holds 32 tokens of one key-value head: in bf16 keys as [pairs of dimensions][32 tokens][2] and values as
// [pairs of tokens][dim][2], in float32 as [dim][32 tokens] and [32 tokens][dim], so that both products read it as `product.h` reads
// weights. The head's size is rounded up to 32, with zeros.
//
// Blocks are processed in order and in pairs, the first of which has an even number, with a running maximum (online softmax: Milakov &
// Gimelshein, arXiv:1805.02867). A row's result depends on its own pairs alone and on their order, so it is the same alone, in a
// batch, in prefill and in decoding, no matter whether blocks that several sequences share are read once for all of them or once
// for each. A pair halves what is not a product: the largest score and the sum of a row, and the loads and stores of its result.
#pragma once
#include "formulas.h"
#include "product.h"

constexpr int ROWS = 32, PAIRED = 2, SPAN = PAIRED * SIDE;
constexpr int TOGETHER = 128;  // rows of a prompt that read keys and values together: several tiles, while a pair of blocks is in the cache
constexpr float LOWEST = -1e30f;

template <class X>
struct alignas(64) Queries {
    float peak[ROWS], total[ROWS];
    int from[ROWS], to[ROWS];  // positions [from, to) are seen
    int rows, dim;             // dim: rounded up to 32
    X* q;                      // [32, dim]
    float* out;                // [32, dim], to be divided by total

    void begin() {
        for (int r = 0; r < ROWS; r++) peak[r] = LOWEST, total[r] = 0;
        for (int r = rows; r < ROWS; r++) from[r] = to[r] = 0;
        std::memset(out, 0, sizeof(float) * ROWS * dim);
    }

    // Continues with some rows of `all` alone.
    void split(const Queries& all, int first, int count) {
        rows = count;
        for (int r = 0; r < ROWS; r++) peak[r] = LOWEST, total[r] = 0, from[r] = to[r] = 0;
        for (int r = 0; r < count; r++) {
            peak[r] = all.peak[first + r], total[r] = all.total[first + r], from[r] = all.from[first + r], to[r] = all.to[first + r];
            std::memcpy(out + r * dim, all.out + (first + r) * dim, dim * sizeof(float));
            std::memcpy(q + r * dim, all.q + (first + r) * dim, dim * sizeof(X));
        }
    }
};

// One or two neighbouring blocks of keys, each followed by its values, whose first token is at position `first`, a multiple of 64.
template <class W>
struct Seen {
    const W* block[PAIRED];
    int count, first;
    const W* next = nullptr;  // the keys that are read after these blocks, if all are read from memory
};

template <class X, class W>
static inline void score(const Queries<X>& a, const Seen<W>& seen, float* s) {
    constexpr int PAIR = sizeof(float) / sizeof(W);
    for (int b = 0; b < seen.count; b++) {
        Panel<W> keys = {seen.block[b], AREA, PAIR * SIDE, PAIR * 16};
        if (seen.next) keys.then = b + 1 < seen.count ? seen.block[b + 1] : seen.block[0] + a.dim * SIDE;
        multiply<false>(Inputs<X>{a.q, (size_t)a.dim, SIDE}, keys, a.dim / SIDE, s + b * SIDE, SPAN, a.rows);
    }
}

// Scores of `blocks` blocks, scaled and kept below `cap`. Apart from the others, whose registers it would take.
static __attribute__((noinline)) void bend(int rows, int blocks, float scale, float cap, float* s) {
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < blocks * SIDE; i += 16) store(s + row * SPAN + i, capped(load(s + row * SPAN + i) * scale, cap));
}

// Four rows of scores become weights: 2 to the power of scale times score, below the highest so far. Sums and what is to be divided by
// them follow if the highest rises.
template <class X>
static inline void weigh(Queries<X>& a, int row, int first, float scale, float* s, X* weights) {
    constexpr int EACH = SPAN / 16;
    f16x best[4], total[4];
    UNROLLED_4 for (int r = 0; r < 4; r++) {
        float* mine = s + (row + r) * SPAN;
        if (first < a.from[row + r] || first + SPAN > a.to[row + r])
            for (int i = 0; i < SPAN; i += 16) store(mine + i, within(load(mine + i), first + i, a.from[row + r], a.to[row + r]));
        best[r] = load(mine);
        UNROLLED_4 for (int i = 1; i < EACH; i++) best[r] = max16(load(mine + i * 16), best[r]);
    }
    float high[4], sums[4];
    largest4(best, high);
    for (int r = 0; r < 4; r++) {
        float& peak = a.peak[row + r];
        if (!((high[r] *= scale) > peak)) continue;
        const float shrink = exp2_16(splat(peak - high[r]))[0];
        float* out = a.out + (row + r) * a.dim;
        for (int d = 0; d < a.dim; d += 16) store(out + d, load(out + d) * shrink);
        a.total[row + r] *= shrink, peak = high[r];
    }
    UNROLLED_4 for (int r = 0; r < 4; r++) {
        total[r] = f16x{};
        UNROLLED_4 for (int i = 0; i < EACH; i++) {
            const f16x weight = weight_of(difference(load(s + (row + r) * SPAN + i * 16), scale, a.peak[row + r]), weights);
            total[r] += weight;
            write(weights + (row + r) * SPAN + i * 16, weight);
        }
    }
    sum4(total, sums);
    for (int r = 0; r < 4; r++) a.total[row + r] += sums[r];
}

template <class X, class W>
static inline void gather(const Queries<X>& a, const Seen<W>& seen, const X* weights) {
    constexpr int PAIR = sizeof(float) / sizeof(W);
    const size_t apart = seen.count > 1 ? seen.block[1] - seen.block[0] : 0;  // modulo the size of memory: the second may lie before
    for (int d = 0; d < a.dim; d += SIDE)
        multiply<true>(Inputs<X>{weights, SPAN, SIDE}, Panel<W>{seen.block[0] + a.dim * SIDE + d * PAIR, apart, (size_t)a.dim * PAIR, PAIR * 16}, seen.count,
                       a.out + d, a.dim, a.rows);
}

// All rows of `count` tiles attend to these blocks (bf16 or float32). `scale`: the factor of the scores, times log2(e). `cap`: their bound
// (formulas.h), times log2(e); 0: none.
// The next tile's scores are computed before this one's weights are read again: they need not wait until those have left the processor.
template <class X, class W>
static inline void look(Queries<X>* tiles, int count, const Seen<W>& seen, float scale, float cap = 0) {
    alignas(64) float s[ROWS * SPAN];
    alignas(64) X weights[ROWS * SPAN];
    score(tiles[0], seen, s);
    for (int t = 0; t < count; t++) {
        Queries<X>& a = tiles[t];
        if (seen.next && !t)
            for (int b = 0; b < seen.count; b++) fetch(seen.block[b] + a.dim * SIDE + (b ? 0 : AREA), (a.dim * SIDE - (b ? 0 : AREA)) * sizeof(W));
        if (cap > 0) bend(a.rows, seen.count, scale, cap, s);
        for (int row = 0; row < a.rows; row += 4) weigh(a, row, seen.first, cap > 0 ? 1 : scale, s, weights);
        if (t + 1 < count) score(tiles[t + 1], seen, s);
        else if (seen.next) fetch(seen.next, AREA * sizeof(W));
        gather(a, seen, weights);
    }
}
