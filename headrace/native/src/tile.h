// Products in vector registers: R rows by ACROSS vectors of outputs are summed at a time.
//
// A tier includes this after saying what its registers hold: `fvec`, a vector of float32, ACROSS, and TALL (the most rows), so
// that sums, weights and one input fit into them, and that enough sums are in flight to hide the latency of a multiply-add. If
// the processor has instructions for products of bf16 (PAIRS), the tier adds an overload of `add_step`.
#pragma once

constexpr int LANES = sizeof(fvec) / sizeof(float), DEEP = 4, AHEAD = 8192;
typedef uint32_t uvec __attribute__((vector_size(sizeof(fvec)), aligned(4)));
static_assert(SIDE % (LANES * ACROSS) == 0 && LANES <= 16, "a panel is a whole number of tiles");

#define UNROLLED _Pragma("GCC unroll 16")

template <int R>
struct Sums {
    fvec at[R][ACROSS];
};

// Prefetches the data AHEAD in the panel, or after it, during the multiplications: the processor's own prefetching ends at
// pages, and one step's multiplications fill the window in which it could run ahead by itself.
template <class W>
INLINED void await_weights(const W* w, size_t beside) {
    UNROLLED for (int v = 0; v < ACROSS * LANES; v += 16) __builtin_prefetch((const char*)(w + v / 16 * beside) + AHEAD, 0, 3);
}

// sums += 32 inputs of R rows times one step of a panel.
template <int R>
INLINED void add_step(Sums<R>& sums, const float* x, size_t row, const float* w, size_t next, size_t beside) {
    for (int i = 0; i < SIDE; i++, w += next) {
        await_weights(w, beside);
        fvec weight[ACROSS];
        UNROLLED for (int v = 0; v < ACROSS; v++) weight[v] = *(const fvec*)(w + v * LANES / 16 * beside + v * LANES % 16);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += weight[v] * x[r * row + i];
    }
}
// The even input of each pair is added before the odd one: the order is that of float32 weights. Pairs are read again for the odd
// ones, because 16 registers are too few to keep them.
template <int R>
INLINED void add_step(Sums<R>& sums, const float* x, size_t row, const bf16* w, size_t next, size_t beside) {
    for (int i = 0; i < SIDE; i += 2, w += next) {
        await_weights(w, beside);
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            fvec weight[ACROSS];
            UNROLLED for (int v = 0; v < ACROSS; v++) {
                uvec pairs = *(const uvec*)(w + v * LANES / 16 * beside + v * LANES % 16 * 2);
                weight[v] = odd ? (fvec)(pairs & 0xffff0000u) : (fvec)(pairs << 16);
            }
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += weight[v] * x[r * row + i + odd];
            asm("" : "+r"(w));
        }
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

// Rows of bf16 are widened first if no instruction multiplies them, as many steps at a time as leave room in the first-level cache
// for the rest.
template <bool ADD, class X, class W>
static inline void multiply(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows) {
    if constexpr (std::is_same<X, float>::value || (PAIRS && std::is_same<W, bf16>::value)) return by_tiles(x, w, steps, c, ld, rows, ADD);
    else {
        alignas(64) float wide[DEEP * AREA];
        for (int s = 0; s < steps; s += DEEP, w.data += DEEP * w.apart) {
            const int deep = std::min(DEEP, steps - s);
            for (int i = 0; i < deep; i++)
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < SIDE; j += 16) store(wide + i * AREA + r * SIDE + j, widen(x.data + (s + i) * x.step + r * x.row + j));
            by_tiles(Inputs<float>{wide}, w, deep, c, ld, rows, ADD || s);
        }
    }
}
