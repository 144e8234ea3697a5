// Products in bf16 with float32 sums, over weights packed once.
//
// Activations lie in blocks of 32 rows by 32 columns, block rows after one another: [rows / 32][columns / 32][32][32]. A block is
// contiguous whether bf16 or float32, so tiles load and store in one piece and the result of a product is the input of the next.
//
// Weights [n, k] lie in panels of 32 outputs. A panel is a list of steps of 32 inputs; a step is two tiles (16 outputs each) of
// [16 pairs of inputs][16 outputs][2]: what AMX multiplies by, and what a broadcast pair of inputs multiplies by without AMX.
//
// Every sum runs over the inputs in the same order whatever the number of rows: a row's result does not depend on its batch.
#pragma once
#include <algorithm>
#include <cstddef>

#include "amx.h"

constexpr int SIDE = 32, AREA = SIDE * SIDE;
static inline int up(int n) { return (n + SIDE - 1) / SIDE; }

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

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
// Rows that are not there are computed too and never read: it costs less than to ask.
// c [32, 32] (rows `ld` floats apart) = x [32, steps * 32] times one panel, added to what c holds where ADD. 16 rows where `half`.
template <bool ADD>
static inline void multiply(const bf16* x, const bf16* w, int steps, float* c, size_t ld, bool half) {
    VISIBLE();
    if (ADD) {
        _tile_loadd(0, c, ld * 4);
        _tile_loadd(1, c + 16, ld * 4);
        if (!half) {
            _tile_loadd(2, c + 16 * ld, ld * 4);
            _tile_loadd(3, c + 16 * ld + 16, ld * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    if (half) {
        for (int s = 0; s < steps; s++, x += AREA, w += AREA) {
            _tile_loadd(4, x, 64);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        for (int s = 0; s < steps; s++, x += AREA, w += AREA) {
            _tile_loadd(4, x, 64);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + 512, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, c + 16 * ld, ld * 4);
        _tile_stored(3, c + 16 * ld + 16, ld * 4);
    }
    _tile_stored(0, c, ld * 4);
    _tile_stored(1, c + 16, ld * 4);
}
#else
static inline bool tiles_allowed() { return true; }
static inline void tiles_begin() {}
static inline void tiles_end() {}

// acc + x0 * even + x1 * odd for sixteen outputs, from one pair of inputs.
static inline f16x pair(f16x acc, const bf16* x, const bf16* w) {
#if defined(__AVX512BF16__)
    int both;
    std::memcpy(&both, x, 4);
    return (f16x)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(both), (__m512bh)_mm512_loadu_si512(w));
#else
    u16x bits;
    std::memcpy(&bits, w, 64);
    acc += (f16x)(bits << 16) * widen1(x[0]);
    return acc + (f16x)(bits & 0xffff0000u) * widen1(x[1]);
#endif
}
template <bool ADD>
static inline void multiply(const bf16* x, const bf16* w, int steps, float* c, size_t ld, bool half) {
    constexpr int ROWS = 4;
    for (int first = 0; first < (half ? 16 : 32); first += ROWS, x += ROWS * SIDE, c += ROWS * ld) {
        f16x acc[ROWS][2] = {};
        for (int r = 0; ADD && r < ROWS; r++) acc[r][0] = load(c + r * ld), acc[r][1] = load(c + r * ld + 16);
        for (int s = 0; s < steps; s++)
            for (int i = 0; i < 16; i++)
                for (int r = 0; r < ROWS; r++) {
                    const bf16* two = x + (size_t)s * AREA + r * SIDE + 2 * i;
                    acc[r][0] = pair(acc[r][0], two, w + (size_t)s * AREA + 32 * i);
                    acc[r][1] = pair(acc[r][1], two, w + (size_t)s * AREA + 512 + 32 * i);
                }
        for (int r = 0; r < ROWS; r++) store(c + r * ld, acc[r][0]), store(c + r * ld + 16, acc[r][1]);
    }
}
#endif
