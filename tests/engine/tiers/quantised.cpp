// Quantises matrices and multiplies their codes by rows of float32 and of bf16, which have layouts of their own; compared with sums over codes that are
// computed here one by one. Prints the tier. Fails with a sentence.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "quantising.h"

static std::mt19937 generator(7);

template <class X>
static bool right(const char* what, int n, int k) {
    std::vector<stored> w((size_t)n * k);
    for (stored& one : w) one = narrow1(std::normal_distribution<float>()(generator));
    std::vector<int32_t> rows(n);
    for (int j = 0; j < n; j++) rows[j] = n - 1 - j;
    std::vector<code> codes((size_t)up(n) * up(k) * AREA + 65536);  // what is fetched ahead need not be there, but may be
    std::vector<float> scales(up(n) * SIDE);
    std::vector<X> x(up(k) * AREA);
    for (X& one : x) write1(&one, (float)((int)(generator() % 9) - 4));  // all sums are exact
    const Linear into = {nullptr, nullptr, n, k, codes.data(), scales.data()};
    for (int panel = 0; panel < up(n); panel++) {
        quantise_panel<sizeof(X) == sizeof(bf16)>(w.data(), rows.data(), into, panel, 127);
        for (int count : {1, 2, 5, 16, 32}) {
            float c[AREA];
            multiply<false>(Inputs<X>{x.data()}, into.panel(into.codes, panel, panel, 1), up(k), c, SIDE, count);
            for (int r = 0; r < count; r++)
                for (int j = 0; j < SIDE; j++) {
                    const int output = panel * SIDE + j;
                    float largest = 0;
                    for (int i = 0; output < n && i < k; i++) largest = std::max(largest, std::fabs(read1(&w[(size_t)rows[output] * k + i])));
                    double sum = 0;
                    for (int i = 0; output < n && i < k; i++)
                        sum += std::nearbyint((double)read1(&w[(size_t)rows[output] * k + i]) * (127.f / largest)) * read1(&x[i / SIDE * AREA + r * SIDE + i % SIDE]);
                    const float scale = output < n ? largest / 127 : 0;
                    if (c[r * SIDE + j] != (float)sum || scales[output] != scale)
                        return std::printf("%s, %d rows: c[%d, %d] is %g, not %g; scale %g, not %g\n", what, count, r, output, c[r * SIDE + j], sum, scales[output], scale), false;
                }
        }
    }
    return true;
}

int main() {
    if (!executable() || !tiles_allowed()) return std::puts("cannot be executed here"), 0;
    tiles_begin();
    bool good = true;
    for (int k : {32, 90, 300}) good = good && right<float>("float32", 70, k) && right<bf16>("bf16", 70, k);
    tiles_end();
    if (good) std::puts(TIER);
    return !good;
}
