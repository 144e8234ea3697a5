// Checks the products of the tier that this is compiled for against sums in double; prints the tier. Fails with a sentence.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "product.h"

static std::mt19937 generator(7);
static void draw(float& x) { x = std::normal_distribution<float>()(generator); }
static void draw(bf16& x) {
    float wide;
    draw(wide);
    x = narrow1(wide);
}
static void draw(code& x) { x = (int)(generator() % 255) - 127; }
static float read1(const code* p) { return *p; }
template <class T>
static std::vector<T> drawn(size_t count) {
    std::vector<T> all(count);
    for (T& x : all) draw(x);
    return all;
}

// Input i of output j of a panel. Codes lie as weights of the rows' kind do.
template <class X, class W>
static double weight(const Panel<W>& w, int i, int j) {
    if (std::is_same<W, code>::value && std::is_same<X, bf16>::value) return read1(w.data + i / SIDE * AREA + j / 16 * 512 + i % SIDE / 2 * SIDE + j % 16 * 2 + i % 2);
    const int pair = std::is_same<W, bf16>::value ? 2 : 1;
    return read1(w.data + i / SIDE * w.apart + i % SIDE / pair * w.next + j / 16 * w.beside + j % 16 * pair + i % pair);
}

template <bool ADD, class X, class W>
static bool right(const char* what, Inputs<X> x, Panel<W> w, int steps) {
    const size_t ld = 40;
    const std::vector<float> before = drawn<float>(SIDE * ld);
    std::vector<float> whole;
    for (int rows = SIDE; rows > 0; rows--) {
        std::vector<float> c = before;
        multiply<ADD>(x, w, steps, c.data(), ld, rows);
        if (rows == SIDE) whole = c;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < SIDE; j++) {
                double sum = ADD ? before[r * ld + j] : 0, size = std::abs(sum);
                for (int i = 0; i < steps * SIDE; i++) {
                    double one = read1(x.data + r * x.row + i / SIDE * x.step + i % SIDE) * weight<X>(w, i, j);
                    sum += one, size += std::abs(one);
                }
                if (!(std::abs(c[r * ld + j] - sum) <= 1e-6 * size)) return std::printf("%s, %d rows: c[%d, %d] is %g, not %g\n", what, rows, r, j, c[r * ld + j], sum), false;
                if (c[r * ld + j] != whole[r * ld + j]) return std::printf("%s: row %d depends on whether there are %d rows\n", what, r, rows), false;
            }
        for (int r = 0; r < SIDE; r++)
            for (size_t j = SIDE; j < ld; j++)
                if (c[r * ld + j] != before[r * ld + j]) return std::printf("%s, %d rows: wrote beside c\n", what, rows), false;
    }
    return true;
}

template <class X, class W>
static bool all(const char* what) {
    const int most = 11, dim = 96;
    const std::vector<X> x = drawn<X>(most * AREA);
    const std::vector<W> w = drawn<W>(most * AREA + 65536);  // what is fetched ahead need not be there, but may be
    const size_t pair = sizeof(float) / sizeof(W);
    bool good = true;
    for (int steps : {1, 3, 4, 5, 11}) {
        good = good && right<false>(what, Inputs<X>{x.data()}, Panel<W>{w.data()}, steps);
        good = good && right<true>(what, Inputs<X>{x.data(), (size_t)steps * SIDE, SIDE}, Panel<W>{w.data()}, steps);
    }
    if (std::is_same<W, code>::value) return good;
    // As attention reads keys (steps of 32 dimensions) and values (one step of 32 tokens).
    good = good && right<false>(what, Inputs<X>{x.data(), dim, SIDE}, Panel<W>{w.data(), AREA, pair * SIDE, pair * 16}, dim / SIDE);
    return good && right<true>(what, Inputs<X>{x.data()}, Panel<W>{w.data() + SIDE * pair, 0, pair * dim, pair * 16}, 1);
}

int main() {
    if (!executable() || !tiles_allowed()) return std::puts("cannot be executed here"), 0;
    tiles_begin();
    bool good = all<bf16, bf16>("bf16") && all<float, bf16>("float32 times bf16") && all<float, float>("float32");
    good = good && all<float, code>("float32 times codes") && all<bf16, code>("bf16 times codes");
    tiles_end();
    if (good) std::puts(TIER);
    return !good;
}
