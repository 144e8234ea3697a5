// Products in vector registers: R rows by ACROSS vectors of outputs are summed at a time.
//
// A tier includes this after saying what its registers hold: `fvec`, a vector of float32, ACROSS, and TALL (the most rows), so that sums,
// weights and one input fit into them, and that enough sums are in flight to hide the latency of a multiply-add. Where a product
// of bf16 has instructions of its own (PAIRS), the tier adds an overload of `add_step`.
#pragma once

constexpr int LANES = sizeof(fvec) / sizeof(float), DEEP = 4;
typedef uint32_t uvec __attribute__((vector_size(sizeof(fvec)), aligned(4)));
static_assert(SIDE % (LANES * ACROSS) == 0 && LANES <= 16, "a panel is a whole number of tiles");

#define UNROLLED _Pragma("GCC unroll 16")
#define INLINED static inline __attribute__((always_inline))

template <int R>
struct Sums {
    fvec at[R][ACROSS];
};

// sums += 32 inputs of R rows times one step of a panel.
template <int R>
INLINED void add_step(Sums<R>& sums, const float* x, size_t row, const float* w, size_t next, size_t beside) {
    for (int i = 0; i < SIDE; i++, w += next) {
        fvec weight[ACROSS];
        UNROLLED for (int v = 0; v < ACROSS; v++) weight[v] = *(const fvec*)(w + v * LANES / 16 * beside + v * LANES % 16);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += weight[v] * x[r * row + i];
    }
}
// The even input of each pair is added before the odd one: the order is that of float32 weights.
template <int R>
INLINED void add_step(Sums<R>& sums, const float* x, size_t row, const bf16* w, size_t next, size_t beside) {
    for (int i = 0; i < SIDE; i += 2, w += next) {
        fvec even[ACROSS], odd[ACROSS];
        UNROLLED for (int v = 0; v < ACROSS; v++) {
            uvec pairs = *(const uvec*)(w + v * LANES / 16 * beside + v * LANES % 16 * 2);
            even[v] = (fvec)(pairs << 16), odd[v] = (fvec)(pairs & 0xffff0000u);
        }
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += even[v] * x[r * row + i];
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += odd[v] * x[r * row + i + 1];
    }
}

// A product of R rows.
template <int R, class X, class W>
static void rows_of(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, bool add) {
    for (int column = 0; column < SIDE; column += ACROSS * LANES) {
        const W* from = w.data + column / 16 * w.beside + column % 16 * (std::is_same<W, bf16>::value ? 2 : 1);
        Sums<R> sums;
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] = add ? *(fvec*)(c + r * ld + column + v * LANES) : fvec{};
        for (int s = 0; s < steps; s++) add_step<R>(sums, x.data + s * x.step, x.row, from + s * w.apart, w.next, w.beside);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) *(fvec*)(c + r * ld + column + v * LANES) = sums.at[r][v];
    }
}

template <int R, class X, class W>
INLINED void at_most(int high, Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, bool add) {
    if constexpr (R > 1)
        if (high < R) return at_most<R - 1>(high, x, w, steps, c, ld, add);
    rows_of<R>(x, w, steps, c, ld, add);
}

// Rows in tiles of nearly equal height.
template <class X, class W>
static inline void by_tiles(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows, bool add) {
    for (int tiles = (rows + TALL - 1) / TALL; tiles; tiles--) {
        const int high = (rows + tiles - 1) / tiles;
        at_most<TALL>(high, x, w, steps, c, ld, add);
        x.data += high * x.row, c += high * ld, rows -= high;
    }
}

// `steps` of rows or of a panel in float32, in `room`.
static inline Inputs<float> wide(Inputs<bf16> x, int steps, int rows, float* room) {
    for (int s = 0; s < steps; s++)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < SIDE; i += 16) store(room + s * AREA + r * SIDE + i, widen(x.data + s * x.step + r * x.row + i));
    return {room};
}
static inline Panel<float> wide(Panel<bf16> w, int steps, float* room) {
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < SIDE; i += 2)
            for (int v = 0; v < SIDE; v += LANES) {
                uvec pairs = *(const uvec*)(w.data + s * w.apart + i / 2 * w.next + v / 16 * w.beside + v % 16 * 2);
                *(fvec*)(room + s * AREA + i * SIDE + v) = (fvec)(pairs << 16);
                *(fvec*)(room + s * AREA + (i + 1) * SIDE + v) = (fvec)(pairs & 0xffff0000u);
            }
    return {room};
}

// bf16 is widened once for all rows, as many steps at a time as leave the first-level cache room for the rest.
template <bool ADD, class X, class W>
static inline void multiply(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows) {
    constexpr bool narrow_x = std::is_same<X, bf16>::value, narrow_w = std::is_same<W, bf16>::value;
    if constexpr (PAIRS && narrow_x && narrow_w) return by_tiles(x, w, steps, c, ld, rows, ADD);
    if constexpr (!narrow_x)
        if (!narrow_w || rows <= TALL) return by_tiles(x, w, steps, c, ld, rows, ADD);
    alignas(64) float wide_x[narrow_x ? DEEP * AREA : 1], wide_w[narrow_w ? DEEP * AREA : 1];
    for (int s = 0; s < steps; s += DEEP) {
        const int deep = std::min(DEEP, steps - s);
        Inputs<float> rows_now;
        Panel<float> panel_now;
        if constexpr (narrow_x) rows_now = wide(Inputs<X>{x.data + s * x.step, x.row, x.step}, deep, rows, wide_x);
        else rows_now = {x.data + s * x.step, x.row, x.step};
        if constexpr (narrow_w) panel_now = wide(Panel<W>{w.data + s * w.apart, w.apart, w.next, w.beside}, deep, wide_w);
        else panel_now = {w.data + s * w.apart, w.apart, w.next, w.beside};
        by_tiles(rows_now, panel_now, deep, c, ld, rows, ADD || s);
    }
}
