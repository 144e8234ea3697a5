// y = x W^T for one or several W over the same x, and both of its gradients, in bf16 or float32 with float32 sums.
#pragma once
#include <unistd.h>

#include "loops.h"

template <class T>
struct Weight {
    const T *across, *down;  // packed for y = x W^T: [up(n)][up(k)][AREA], and for dx = dy W: [up(k)][up(n)][AREA]
    const float* bias;       // [n] or null
    T* y;                    // [rows, n], in float32 if `wide`; in the backward pass dy
    float* gradient;         // [n, k] or null
    const float* onto;       // [rows, n]: the initial values of the sums, or null for zero
    const T *thin, *low;     // an adapter adds thin [rows, ranks] times low, packed as `across` is; its bias comes after that
    int32_t n, add, wide, ranks;  // add: to the content of the gradient; ranks 0: no adapter
};

// Lets make(to, ld) write a block [32, 32] to rows of memory that are read later: in float32 elsewhere first, so that they can be streamed.
template <class T, class Make>
static inline void far(T* to, size_t ld, const Make& make) {
    if constexpr (sizeof(T) == 2) return make(to, ld);
    else {
        alignas(64) T block[AREA];
        make(block, SIDE);
        for (int r = 0; r < SIDE; r++) stream(to + r * ld, load(block + r * SIDE), load(block + r * SIDE + 16));
    }
}

// Both packings of a matrix [n, k] of float32; null for one that is not wanted.
template <class T>
static void pack_weight(const float* w, int n, int k, T* across, T* down) {
    team::each(up(n), [&](int panel) {
        alignas(64) T block[AREA];
        for (int step = 0; step < up(k); step++) {
            cut(w + (size_t)panel * SIDE * k + step * SIDE, k, std::min(SIDE, n - panel * SIDE), std::min(SIDE, k - step * SIDE), block, SIDE);
            if (across) far<T>(across + ((size_t)panel * up(k) + step) * AREA, SIDE, [&](T* to, size_t) { pack_across(block, SIDE, to); });
            if (down) far<T>(down + ((size_t)step * up(n) + panel) * AREA, SIDE, [&](T* to, size_t) { pack_down(block, SIDE, to); });
        }
        streamed();
    });
}

// The distance between rows of `steps` steps: whole cache lines, and no multiple of 4 KiB, with which all rows would begin in the
// same set of the first-level cache. Odd multiples of 2 and 1 KiB leave two and four sets, which is enough; copying rows because of
// them cost float32 up to 45 % of a product (4,864 inputs).
template <class T>
static inline size_t apart(int steps) {
    constexpr size_t line = 64 / sizeof(T);
    size_t ld = (size_t)steps * SIDE;
    return ld % (64 * line) ? ld : ld + line;
}

// A part of the sum of a product: `steps` steps of 32 of factor `which`, from step `first` on.
struct Piece {
    int which, first, steps;
};

// Bytes of the second-level cache, within what processors have.
static inline long second_level() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    static const long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);  // 0 or -1 if the system does not know
#else
    constexpr long cache = 0;
#endif
    return std::clamp(cache, 512l << 10, 2048l << 10);
}

// The sum over all factors, factor i of `steps[i]`, in pieces of a panel, which is read again for every few rows and has to stay in the
// cache: an eighth of the second-level one. (Of 2 MiB, pieces of 64 KiB were 3 to 10 % slower, for the sums between them; of 1 MiB,
// whole sums over 1,536 inputs ran at half the speed.) AMX reads a panel for 32 rows at once, and keeps sums in its tiles as long as
// possible.
template <class T>
static std::vector<Piece> pieces_of(const int* steps, int count) {
#if defined(VISIBLE)
    constexpr int most = 256;
#else
    const int most = second_level() / 8 / (AREA * sizeof(T));
#endif
    std::vector<Piece> found;
    for (int i = 0; i < count; i++)
        for (int parts = (steps[i] + most - 1) / most, first = 0; parts; parts--) {
            const int length = (steps[i] - first + parts - 1) / parts;
            found.push_back({i, first, length});
            first += length;
        }
    return found;
}
template <class T>
static std::vector<Piece> pieces_of(std::initializer_list<int> steps) { return pieces_of<T>(steps.begin(), (int)steps.size()); }

// A piece of 32 rows of x [rows, k] from row `first` on, as whole blocks: in place, or a copy padded with zeros.
template <class T>
static inline const T* whole(const T* x, int rows, int k, int first, const Piece& piece, size_t& ld) {
    const int column = piece.first * SIDE, columns = std::min(k - column, piece.steps * SIDE);
    x += (size_t)first * k + column, ld = k;
    if (first + SIDE <= rows && columns == piece.steps * SIDE && apart<T>(up(k)) == ld) return x;
    ld = apart<T>(piece.steps);
    T* copy = team::room<T>(SIDE * ld, 0);
    for (int r = 0; r < SIDE; r++) {  // row by row, as the processor prefetches
        const int there = first + r < rows ? columns : 0;
        std::memcpy(copy + r * ld, x + (size_t)r * k, there * sizeof(T));
        std::memset(copy + r * ld + there, 0, (piece.steps * SIDE - there) * sizeof(T));
    }
    return copy;
}

// The factors of x W^T + thin low^T, one sum whose first pieces are of x and whose second are of the adapter's.
template <class T>
static inline const T* rows_of(const Weight<T>& w, const T* x, int rows, int k, int b, const Piece& piece, size_t& ld) {
    return piece.which ? whole(w.thin, rows, w.ranks, b * SIDE, piece, ld) : whole(x, rows, k, b * SIDE, piece, ld);
}
template <class T>
static inline const T* panel_of(const Weight<T>& w, int k, const Piece& piece, int panel) {
    return piece.which ? w.low + ((size_t)panel * up(w.ranks) + piece.first) * AREA : w.across + ((size_t)panel * up(k) + piece.first) * AREA;
}

// Stores a block of results [32, 32] to rows of T. Whole rows are stored without a test between them: the stores wait in the
// processor's queue for their lines of memory while the next block is computed.
template <class T>
static void put(const float* c, const float* bias, T* to, size_t ld, int rows, int columns) {
    if (columns < SIDE) {
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < columns; i++) write1(to + r * ld + i, c[r * SIDE + i] + (bias ? bias[i] : 0.f));
    } else if (bias) {
        const f16x first = load(bias), second = load(bias + 16);
        for (int r = 0; r < rows; r++, c += SIDE) stream(to + r * ld, load(c) + first, load(c + 16) + second);
    } else
        for (int r = 0; r < rows; r++, c += SIDE) stream(to + r * ld, load(c), load(c + 16));
}

constexpr int ROWS_AT_ONCE = 8;

// The number of panels to process for some rows before the next rows: a piece of them and their sums should fill half of the
// second-level cache.
template <class T>
static inline int panels_at_once(const std::vector<Piece>& pieces) {
    int longest = 1;
    for (const Piece& piece : pieces) longest = std::max(longest, piece.steps);
    const long sums = pieces.size() > 1 ? ROWS_AT_ONCE * AREA * sizeof(float) : 0;
    return std::max<long>(1, second_level() / 2 / (longest * AREA * (long)sizeof(T) + sums));
}

// Blocks of 32 by 32 of the sum over all pieces of rows times panels. rows(piece, b, ld): 32 rows, from one to the next `ld`.
// panel(piece, j): one panel. begin(c, b, j): whether it wrote the sum's initial value into c. out(c, b, j): takes a block [32,
// 32] of results. With EACH > 1, out takes as many blocks at once, and j counts them: their panels are j * EACH and what follows.
template <class T, int EACH = 1, class X, class W, class Begin, class Out>
static void product(int row_blocks, int panels, const std::vector<Piece>& pieces, const X& rows, const W& panel, const Begin& begin, const Out& out) {
    const int most = std::max(1, panels_at_once<T>(pieces) / EACH), groups = (panels + most - 1) / most, wide = (panels + groups - 1) / groups;
    const int high = (row_blocks + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    team::each(groups * high, [&](int item) {
        const int from = item / high * wide, to = std::min(panels, from + wide), top = item % high * ROWS_AT_ONCE;
        float* sums = team::room<float>((pieces.size() > 1 ? ROWS_AT_ONCE * wide : 1) * EACH * AREA, 1);
        for (size_t p = 0; p < pieces.size(); p++)
            for (int b = top; b < std::min(row_blocks, top + ROWS_AT_ONCE); b++) {
                size_t ld;
                const T* x = rows(pieces[p], b, ld);
                for (int j = from; j < to; j++) {
                    float* c = sums + (pieces.size() > 1 ? ((b - top) * wide + j - from) * EACH * AREA : 0);
                    const bool begun = p || begin(c, b, j);
                    for (int i = 0; i < EACH; i++) {
                        const T* w = panel(pieces[p], j * EACH + i);
                        if (begun) multiply<true>(x, ld, w, AREA, pieces[p].steps, c + i * AREA, SIDE);
                        else multiply<false>(x, ld, w, AREA, pieces[p].steps, c + i * AREA, SIDE);
                    }
                    if (p + 1 == pieces.size()) out(c, b, j);
                }
            }
        streamed();
    });
}

// Lets sums begin with zero.
static inline bool from_nothing(float*, int, int) { return false; }

template <class T>
static void linear(const T* x, int rows, int k, const Weight<T>* weights, int count) {
    for (const Weight<T>* w = weights; w < weights + count; w++) {
        const auto place = [&](int b, int panel) { return (size_t)b * SIDE * w->n + panel * SIDE; };
        const auto high = [&](int b) { return std::min(SIDE, rows - b * SIDE); };
        const auto columns = [&](int panel) { return std::min(SIDE, w->n - panel * SIDE); };
        product<T>(
            up(rows), up(w->n), pieces_of<T>({up(k), up(w->ranks)}), [&](const Piece& piece, int b, size_t& ld) { return rows_of(*w, x, rows, k, b, piece, ld); },
            [&](const Piece& piece, int panel) { return panel_of(*w, k, piece, panel); },
            [&](float* c, int b, int panel) {
                if (w->onto) cut(w->onto + place(b, panel), w->n, high(b), columns(panel), c, SIDE);
                return w->onto != nullptr;
            },
            [&](const float* c, int b, int panel) {
                const float* bias = w->bias ? w->bias + panel * SIDE : nullptr;
                if (w->wide) put(c, bias, (float*)w->y + place(b, panel), w->n, high(b), columns(panel));
                else put(c, bias, w->y + place(b, panel), w->n, high(b), columns(panel));
            });
    }
}

// dx [rows, k] = the sum over all weights of dy W, in T or float32.
template <class T, class D>
static void linear_input_gradient(D* dx, int rows, int k, const Weight<T>* weights, int count) {
    int steps[8];
    for (int i = 0; i < count; i++) steps[i] = up(weights[i].n);
    product<T>(
        up(rows), up(k), pieces_of<T>(steps, count),
        [&](const Piece& piece, int b, size_t& ld) { return whole<T>(weights[piece.which].y, rows, weights[piece.which].n, b * SIDE, piece, ld); },
        [&](const Piece& piece, int panel) { return weights[piece.which].down + ((size_t)panel * steps[piece.which] + piece.first) * AREA; },
        from_nothing,
        [&](const float* c, int b, int panel) {
            put(c, nullptr, dx + (size_t)b * SIDE * k + panel * SIDE, k, std::min(SIDE, rows - b * SIDE), std::min(SIDE, k - panel * SIDE));
        });
}

// Block (row, column) of a matrix [rows, columns]: in place, or copied and padded with zeros.
template <class T>
static inline const T* part(const T* x, int rows, int columns, int row, int column, T* copy, size_t& ld) {
    x += (size_t)row * SIDE * columns + column * SIDE;
    int high = std::min(SIDE, rows - row * SIDE), wide = std::min(SIDE, columns - column * SIDE);
    ld = columns;
    if (high == SIDE && wide == SIDE) return x;
    cut(x, ld, high, wide, copy, SIDE);
    ld = SIDE;
    return copy;
}

// Stores a block of results [32, 32] to rows of a gradient, or adds it to them.
static void add_up(const float* c, float* to, size_t ld, int rows, int columns, bool add) {
    if (!add) return put(c, nullptr, to, ld, rows, columns);
    for (int r = 0; r < rows; r++, c += SIDE, to += ld) {
        if (columns == SIDE) store(to, load(c) + load(to)), store(to + 16, load(c + 16) + load(to + 16));
        else
            for (int i = 0; i < columns; i++) to[i] += c[i];
    }
}

// Elements that linear_weight_gradient needs for weights of at most n outputs.
template <class T>
static inline size_t room_of(int rows, int k, int n) {
    return (size_t)up(k) * up(rows) * AREA + (size_t)up(n) * SIDE * apart<T>(up(rows));
}

// gradient [n, k] = dy^T x, or added to it. `room`: of the size that room_of returns for the largest n.
template <class T>
static void linear_weight_gradient(const T* x, int rows, int k, const Weight<T>* weights, int count, T* room) {
    int steps = up(rows);
    T *packed = room, *turned = room + (size_t)up(k) * steps * AREA;
    const size_t ld = apart<T>(steps);
    team::each(steps, [&](int step) {
        alignas(64) T block[AREA];
        size_t from;
        for (int panel = 0; panel < up(k); panel++) {
            const T* whole = part(x, rows, k, step, panel, block, from);
            far<T>(packed + ((size_t)panel * steps + step) * AREA, SIDE, [&](T* to, size_t) { pack_down(whole, from, to); });
        }
        streamed();
    });
    const auto pieces = pieces_of<T>({steps});
    for (const Weight<T>* w = weights; w < weights + count; w++) {
        if (!w->gradient) continue;
        if (!steps && !w->add) std::memset(w->gradient, 0, (size_t)w->n * k * sizeof(float));
        if (!steps) continue;
        team::each(steps, [&](int step) {
            alignas(64) T block[AREA];
            size_t from;
            for (int b = 0; b < up(w->n); b++) {
                const T* whole = part(w->y, rows, w->n, step, b, block, from);
                far<T>(turned + (size_t)b * SIDE * ld + step * SIDE, ld, [&](T* to, size_t to_ld) { turn(whole, from, to, to_ld); });
            }
            streamed();
        });
        product<T>(
            up(w->n), up(k), pieces,
            [&](const Piece& piece, int b, size_t& apart) {
                apart = ld;
                return turned + (size_t)b * SIDE * ld + piece.first * SIDE;
            },
            [&](const Piece& piece, int panel) { return packed + ((size_t)panel * steps + piece.first) * AREA; }, from_nothing,
            [&](const float* c, int b, int panel) {
                add_up(c, w->gradient + (size_t)b * SIDE * k + panel * SIDE, k, std::min(SIDE, w->n - b * SIDE), std::min(SIDE, k - panel * SIDE), w->add);
            });
    }
}
