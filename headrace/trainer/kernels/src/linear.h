// y = x W^T for one or several W over the same x, and both of its gradients, in bf16 with float32 sums.
#pragma once
#include "loops.h"

struct Weight {
    const bf16 *across, *down;  // packed for y = x W^T: [up(n)][up(k)][AREA], and for dx = dy W: [up(k)][up(n)][AREA]
    const float* bias;          // [n] or null
    bf16* y;                    // [rows, n], in float32 where `wide`; in the backward pass dy
    float* gradient;            // [n, k] or null
    const float* onto;          // [rows, n]: what the sums begin with, or null for zero
    int32_t n, add, wide;       // add: to what the gradient holds
};

// Both packings of a matrix [n, k] of float32.
static void pack_weight(const float* w, int n, int k, bf16* across, bf16* down) {
    team::each(up(n), [&](int panel) {
        alignas(64) bf16 block[AREA];
        for (int step = 0; step < up(k); step++) {
            cut(w + (size_t)panel * SIDE * k + step * SIDE, k, std::min(SIDE, n - panel * SIDE), std::min(SIDE, k - step * SIDE), block, SIDE);
            pack_across(block, SIDE, across + ((size_t)panel * up(k) + step) * AREA);
            if (down) pack_down(block, SIDE, down + ((size_t)step * up(n) + panel) * AREA);
        }
    });
}

// 32 rows of x [rows, k] from row `first` on as whole blocks: where they lie, or a copy with zeros around it.
static inline const bf16* whole(const bf16* x, int rows, int k, int first, size_t& ld, int which) {
    ld = k;
    if (first + SIDE <= rows && k % SIDE == 0) return x + (size_t)first * k;
    ld = up(k) * SIDE;
    bf16* copy = team::room<bf16>(SIDE * ld, which);
    for (int c = 0; c < k; c += SIDE) cut(x + (size_t)first * k + c, k, rows - first, std::min(SIDE, k - c), copy + c, ld);
    return copy;
}

// A block of results [32, 32] to rows of bf16 or float32.
template <class T>
static inline void put(const float* c, const float* bias, T* to, size_t ld, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j += 16) {
            if (j + 16 <= columns) write(to + r * ld + j, bias ? load(c + r * SIDE + j) + load(bias + j) : load(c + r * SIDE + j));
            else
                for (int i = j; i < columns; i++) write1(to + r * ld + i, c[r * SIDE + i] + (bias ? bias[i] : 0.f));
        }
}

// How many panels of k inputs to go through for all rows before the next: they should stay in the second-level cache.
static inline int panels_at_once(int k) { return std::max(1, (512 << 10) / (up(k) * AREA * 2)); }
constexpr int ROWS_AT_ONCE = 8;

template <class F>
static void blocks_of(int row_blocks, int panels, int k, const F& f) {
    int wide = panels_at_once(k), groups = (panels + wide - 1) / wide, high = (row_blocks + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    team::each(groups * high, [&](int item) {
        int group = item / high, rows = item % high;
        for (int b = rows * ROWS_AT_ONCE; b < std::min(row_blocks, (rows + 1) * ROWS_AT_ONCE); b++)
            f(b, group * wide, std::min(panels, (group + 1) * wide));
    });
}

static void linear(const bf16* x, int rows, int k, const Weight* weights, int count) {
    for (const Weight* w = weights; w < weights + count; w++)
        blocks_of(up(rows), up(w->n), k, [&](int b, int from, int to) {
            size_t ld;
            const bf16* a = whole(x, rows, k, b * SIDE, ld, 0);
            alignas(64) float c[AREA];
            for (int panel = from; panel < to; panel++) {
                const size_t at = (size_t)b * SIDE * w->n + panel * SIDE;
                const int high = std::min(SIDE, rows - b * SIDE), columns = std::min(SIDE, w->n - panel * SIDE);
                const bf16* across = w->across + (size_t)panel * up(k) * AREA;
                const float* bias = w->bias ? w->bias + panel * SIDE : nullptr;
                if (w->onto) {
                    cut(w->onto + at, w->n, high, columns, c, SIDE);
                    multiply<true>(a, ld, across, AREA, up(k), c, SIDE);
                } else multiply<false>(a, ld, across, AREA, up(k), c, SIDE);
                if (w->wide) put(c, bias, (float*)w->y + at, w->n, high, columns);
                else put(c, bias, w->y + at, w->n, high, columns);
            }
        });
}

// dx [rows, k] = the sum over all weights of dy W.
static void linear_input_gradient(bf16* dx, int rows, int k, const Weight* weights, int count) {
    int n = 0;
    for (int i = 0; i < count; i++) n += weights[i].n;
    blocks_of(up(rows), up(k), n, [&](int b, int from, int to) {
        const bf16* a[8];
        size_t ld[8];
        for (int i = 0; i < count; i++) a[i] = whole(weights[i].y, rows, weights[i].n, b * SIDE, ld[i], i);
        alignas(64) float c[AREA] = {};
        for (int panel = from; panel < to; panel++) {
            for (int i = 0; i < count; i++) {
                int steps = up(weights[i].n);
                const bf16* down = weights[i].down + (size_t)panel * steps * AREA;
                if (i) multiply<true>(a[i], ld[i], down, AREA, steps, c, SIDE);
                else multiply<false>(a[i], ld[i], down, AREA, steps, c, SIDE);
            }
            put(c, nullptr, dx + (size_t)b * SIDE * k + panel * SIDE, k, std::min(SIDE, rows - b * SIDE), std::min(SIDE, k - panel * SIDE));
        }
    });
}

// Block (row, column) of a matrix [rows, columns]: where it lies, or copied with zeros around what there is.
static inline const bf16* part(const bf16* x, int rows, int columns, int row, int column, bf16* copy, size_t& ld) {
    x += (size_t)row * SIDE * columns + column * SIDE;
    int high = std::min(SIDE, rows - row * SIDE), wide = std::min(SIDE, columns - column * SIDE);
    ld = columns;
    if (high == SIDE && wide == SIDE) return x;
    cut(x, ld, high, wide, copy, SIDE);
    ld = SIDE;
    return copy;
}

// gradient [n, k] = dy^T x, or added to it. `room`: [up(k) + up(n)][up(rows)][AREA] for the largest n.
static void linear_weight_gradient(const bf16* x, int rows, int k, const Weight* weights, int count, bf16* room) {
    int steps = up(rows);
    bf16 *packed = room, *turned = room + (size_t)up(k) * steps * AREA;
    size_t ld = steps * SIDE;
    team::each(up(k) * steps, [&](int item) {
        alignas(64) bf16 block[AREA];
        int panel = item / steps, step = item % steps;
        size_t from;
        const bf16* whole = part(x, rows, k, step, panel, block, from);
        pack_down(whole, from, packed + ((size_t)panel * steps + step) * AREA);
    });
    for (const Weight* w = weights; w < weights + count; w++) {
        if (!w->gradient) continue;
        team::each(up(w->n) * steps, [&](int item) {
            alignas(64) bf16 block[AREA];
            int b = item / steps, step = item % steps;
            size_t from;
            const bf16* whole = part(w->y, rows, w->n, step, b, block, from);
            turn(whole, from, turned + (size_t)b * SIDE * ld + step * SIDE, ld);
        });
        blocks_of(up(w->n), up(k), rows, [&](int b, int from, int to) {
            alignas(64) float c[AREA];
            for (int panel = from; panel < to; panel++) {
                const bf16 *a = turned + (size_t)b * SIDE * ld, *p = packed + (size_t)panel * steps * AREA;
                float* out = w->gradient + (size_t)b * SIDE * k + panel * SIDE;
                int high = std::min(SIDE, w->n - b * SIDE), wide = std::min(SIDE, k - panel * SIDE);
                bool full = high == SIDE && wide == SIDE;
                if (full && w->add) multiply<true>(a, ld, p, AREA, steps, out, k);
                else if (full) multiply<false>(a, ld, p, AREA, steps, out, k);
                else {
                    multiply<false>(a, ld, p, AREA, steps, c, SIDE);
                    for (int r = 0; r < high; r++)
                        for (int j = 0; j < wide; j++) out[(size_t)r * k + j] = c[r * SIDE + j] + (w->add ? out[(size_t)r * k + j] : 0.f);
                }
            }
        });
    }
}
