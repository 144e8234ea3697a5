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

template <int R, int A = ACROSS>
struct Sums {
    fvec at[R][A];
};

// What is prefetched during the multiplications: the processor's own prefetching ends at pages, and one step's multiplications fill
// the window in which it could run ahead by itself. Either the panel itself, a distance ahead,
struct Further {
    template <class W>
    inline __attribute__((always_inline)) void input(const W* w, size_t beside) const {
        UNROLLED for (int v = 0; v < ACROSS * LANES; v += 16) __builtin_prefetch((const char*)(w + v / 16 * beside) + AHEAD, 0, 3);
    }
    inline __attribute__((always_inline)) void line(const code* w) const { __builtin_prefetch((const char*)w + AHEAD / 2, 0, 3); }
    inline __attribute__((always_inline)) void step() const {}
};
// or, where the panel is in the cache, `each` bytes of something else with every step.
struct Next {
    const char* from;
    size_t each;

    inline __attribute__((always_inline)) void input(const float*, size_t) const {}
    void step() {
        fetch(from, each);
        from += each;
    }
};

// sums += 32 inputs of R rows times one step of a panel.
template <int R, class Soon>
INLINED void add_step(Sums<R>& sums, const float* x, size_t row, const float* w, size_t next, size_t beside, const Soon& soon) {
    for (int i = 0; i < SIDE; i++, w += next) {
        soon.input(w, beside);
        fvec weight[ACROSS];
        UNROLLED for (int v = 0; v < ACROSS; v++) weight[v] = *(const fvec*)(w + v * LANES / 16 * beside + v * LANES % 16);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += weight[v] * x[r * row + i];
    }
}
INLINED fvec widened(const code* codes) { return (fvec)some_codes(codes); }
// A line of codes holds four inputs.
template <int R, int A, class Soon>
INLINED void add_step(Sums<R, A>& sums, const float* x, size_t row, const code* w, size_t next, size_t beside, const Soon& soon) {
    for (int i = 0; i < SIDE; i += 4) {
        soon.line(w);
        if (A * LANES > 16) soon.line(w + beside);
        UNROLLED for (int j = 0; j < 4; j++, w += next) {
            fvec weight[A];
            UNROLLED for (int v = 0; v < A; v++) weight[v] = widened(w + v * LANES / 16 * beside + v * LANES % 16);
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int v = 0; v < A; v++) sums.at[r][v] += weight[v] * x[r * row + i + j];
        }
    }
}
// The even or the odd inputs of LANES pairs.
INLINED fvec widened(const bf16* pairs, bool odd) {
    const uvec both = *(const uvec*)pairs;
    return odd ? (fvec)(both & 0xffff0000u) : (fvec)(both << 16);
}
// The even input of each pair is added before the odd one: the order is that of float32 weights. Pairs are read again for the odd
// ones, because 16 registers are too few to keep them.
template <int R, class Soon>
INLINED void add_step(Sums<R>& sums, const float* x, size_t row, const bf16* w, size_t next, size_t beside, const Soon& soon) {
    for (int i = 0; i < SIDE; i += 2, w += next) {
        soon.input(w, beside);
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            fvec weight[ACROSS];
            UNROLLED for (int v = 0; v < ACROSS; v++) weight[v] = widened(w + v * LANES / 16 * beside + v * LANES % 16 * 2, odd);
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += weight[v] * x[r * row + i + odd];
            asm("" : "+r"(w));
        }
    }
}

// A product of R rows. Few rows with codes take twice as many outputs at a time, because codes come fast enough that sums wait for each other.
template <int R, class X, class W, class Soon>
static void rows_of(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, bool add, Soon& soon) {
    constexpr int A = std::is_same<W, code>::value && R <= 2 && 2 * ACROSS * LANES <= SIDE ? 2 * ACROSS : ACROSS;
    for (int column = 0; column < SIDE; column += A * LANES) {
        const W* from = w.data + column / 16 * w.beside + column % 16 * (std::is_same<W, bf16>::value ? 2 : 1);
        Sums<R, A> sums;
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < A; v++) sums.at[r][v] = add ? *(fvec*)(c + r * ld + column + v * LANES) : fvec{};
        for (int s = 0; s < steps; s++) {
            soon.step();
            add_step(sums, x.data + s * x.step, x.row, from + s * w.apart, w.next, w.beside, soon);
        }
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < A; v++) *(fvec*)(c + r * ld + column + v * LANES) = sums.at[r][v];
    }
}

// Calls f with the number of rows as a constant.
template <int R, class F>
INLINED void at_most(int high, const F& f) {
    if constexpr (R > 1)
        if (high < R) return at_most<R - 1>(high, f);
    f(std::integral_constant<int, R>{});
}

// Rows in tiles of nearly equal height.
static inline int tiles_of(int rows) { return (rows + TALL - 1) / TALL; }
template <class X, class W, class Soon>
static inline void by_tiles(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows, bool add, Soon soon) {
    for (int tiles = tiles_of(rows); tiles; tiles--) {
        const int high = (rows + tiles - 1) / tiles;
        at_most<TALL>(high, [&](auto constant) { rows_of<decltype(constant)::value>(x, w, steps, c, ld, add, soon); });
        x.data += high * x.row, c += high * ld, rows -= high;
    }
}

static inline void widen_rows(const Inputs<bf16>& x, int rows, int steps, float* wide) {
    for (int s = 0; s < steps; s++, wide += AREA)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < SIDE; j += 16) store(wide + r * SIDE + j, widen(x.data + s * x.step + r * x.row + j));
}
static inline void widen_panel(const Panel<bf16>& w, int steps, float* wide) {
    for (int s = 0; s < steps; s++)
        for (int pair = 0; pair < SIDE / 2; pair++, wide += 2 * SIDE)
            UNROLLED for (int j = 0; j < SIDE; j += LANES) {
                const bf16* from = w.data + s * w.apart + pair * w.next + j / 16 * w.beside + j % 16 * 2;
                *(fvec*)(wide + j) = widened(from, false), *(fvec*)(wide + SIDE + j) = widened(from, true);
            }
}
static inline void widen_panel(const Panel<code>& w, int steps, float* wide) {
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < SIDE; i++, wide += SIDE)
            UNROLLED for (int j = 0; j < SIDE; j += LANES) *(fvec*)(wide + j) = widened(w.data + s * w.apart + i * w.next + j / 16 * w.beside + j % 16);
}

// Whether the tiles of a product share narrow weights that were widened once. Registers of sixteen store them no faster than each tile
// widens them.
constexpr bool SHARED = LANES < 16;

// All tiles of `steps` steps, with a buffer for their weights. `next`: the steps after them, if they are in no cache.
template <class X, class W>
static inline void by_shared(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows, bool add, const W* next) {
    alignas(64) float wide[DEEP * AREA];
    widen_panel(w, steps, wide);
    const size_t lines = next ? DEEP * AREA * sizeof(W) / 64 : 0, parts = tiles_of(rows) * (SIDE / (ACROSS * LANES)) * steps;
    by_tiles(x, Panel<float>{wide}, steps, c, ld, rows, add, Next{(const char*)next, (lines + parts - 1) / parts * 64});
}

// If no instruction multiplies bf16, rows are widened first, and so are weights of several tiles: as many steps at a time as leave
// room in the first-level cache for the rest.
template <bool ADD, class X, class W>
static inline void multiply(Inputs<X> x, Panel<W> w, int steps, float* c, size_t ld, int rows) {
    constexpr bool pairs = PAIRS && std::is_same<X, bf16>::value && std::is_same<W, bf16>::value;
    constexpr bool narrow = std::is_same<X, bf16>::value && !pairs, shared = !std::is_same<W, float>::value && !pairs && SHARED;
    if constexpr (!narrow && !shared) return by_tiles(x, w, steps, c, ld, rows, ADD, Further{});
    else {
        if constexpr (!narrow)
            if (rows <= TALL) return by_tiles(x, w, steps, c, ld, rows, ADD, Further{});
        alignas(64) float wide[narrow ? DEEP * AREA : 1];
        for (int s = 0; s < steps; s += DEEP, x.data += DEEP * x.step, w.data += DEEP * w.apart) {
            const int deep = std::min(DEEP, steps - s);
            const auto times = [&](Inputs<float> rows_of_x) {
                if constexpr (shared)
                    if (rows > TALL) return by_shared(rows_of_x, w, deep, c, ld, rows, ADD || s, w.then && s + DEEP < steps ? w.data + DEEP * w.apart : w.then);
                by_tiles(rows_of_x, w, deep, c, ld, rows, ADD || s, Further{});
            };
            if constexpr (narrow) widen_rows(x, rows, deep, wide), times(Inputs<float>{wide});
            else times(x);
        }
    }
}
