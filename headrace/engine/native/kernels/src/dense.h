// Norms and products of all rows, with bias, activation and adapters.
#pragma once
#include "state.h"

struct Dense : State {
    using State::State;

    // x += scale w(from), normalised first if there is a norm; and all of it times `then`.
    void add(const Pass& p, int index, int which, const Linear& w, Blocks<taken>& from, const float* norm, float then = 1) {
        if (!norm && !w.factors && m.residual_scale == 1 && then == 1) return product<true>(p, index, which, w, from, x);
        product<false>(p, index, which, w, from, side);
        plan.each(p.tokens_count, [=](int row) {
            const float by = m.residual_scale * (norm ? inverse_rms(side, row) : 1);
            for (int c = 0; c < m.hidden; c += 16)
                store(x.at(row, c), plus_normed(load(x.at(row, c)), load(side.at(row, c)), by, norm ? load(norm + c) : splat(1)) * then);
        });
    }

    // The mean of a row of x, and one by the root of the mean square of what is left (LayerNorm, arXiv:1607.06450).
    std::pair<float, float> centred(int row) const {
        const auto inside = [=](f16x v, int c) { return select(count16() + c < m.hidden, v, f16x{}); };
        f16x total = {}, squares = {};
        for (int c = 0; c < m.hidden; c += 16) total += inside(load(x.at(row, c)), c);
        const float mean = sum(total) / m.hidden;
        for (int c = 0; c < m.hidden; c += 16) {
            const f16x left = inside(load(x.at(row, c)) - mean, c);
            squares += left * left;
        }
        return {mean, ::inverse_rms(squares, m.hidden, m.eps)};
    }

    float inverse_rms(const Blocks<float>& from, int row) const {
        f16x squares = {};
        for (int c = 0; c < up(m.hidden) * SIDE; c += 16) squares += load(from.at(row, c)) * load(from.at(row, c));
        return ::inverse_rms(squares, m.hidden, m.eps);
    }

    // h = the norm of all rows of x, or of the chosen ones; without a weight, x itself. Notes the rows that are not finite: the layer before caused it.
    void normalise(int count, const float* weight, const int64_t* chosen, int32_t* broken, int before) {
        constexpr int EACH = 8;
        plan.each((count + EACH - 1) / EACH, [=](int item) {
            for (int to = item * EACH; to < std::min(count, (item + 1) * EACH); to++) {
                int row = chosen ? chosen[to] : to;
                const auto [mean, by] = m.centred ? centred(row) : std::pair(0.f, inverse_rms(x, row));
                if (!(by > 0) && broken[row] < 0) broken[row] = std::max(before, 0);
                for (int c = 0; c < up(m.hidden) * SIDE; c += 16) write(h.at(to, c), weight ? (load(x.at(row, c)) - mean) * by * load(weight + c) : load(x.at(row, c)));
            }
        });
    }

    // Room of this thread for a panel's sums.
    static float* sums_of(int rows) {
        thread_local Arena room;
        room.grow((size_t)up(rows) * AREA * sizeof(float));
        return (float*)room.data;
    }
    // The inputs of 32 rows, from a block on.
    static auto blocks_of(const Blocks<taken>& x, int first = 0) {
        return [&x, first](int b) { return Inputs<taken>{x.block(first + b, 0)}; };
    }

    // f(panel, the next one, first block of rows, rows) for all panels of a product with n rows of k inputs. Rows whose inputs would not
    // stay in the second-level cache from panel to panel are cut into parts, and the weights are read again for each.
    template <class F>
    void each_panel(int n, int k, int panels, const F& f) {
        constexpr size_t CACHED = 1 << 20;
        const int most = std::max<int>(4, CACHED / ((size_t)up(k) * AREA * sizeof(taken))), parts = (up(n) - 1) / most + 1, high = (up(n) + parts - 1) / parts;
        plan.each(parts * panels, [=](int item, int next) {
            const int block = item / panels * high;
            f(item % panels, next < 0 ? next : next % panels, block, std::min(high * SIDE, n - block * SIDE));
        });
    }

    // into(b) = from(b) times panel i of `count`, for all blocks b of some rows, or added to what is there. Sums over codes are whole before
    // they are scaled, so that they are the same numbers beside few rows and many.
    template <bool ADD, class From, class Into>
    static void times(const Linear& w, int i, int next, int count, int rows, const From& from, const Into& into) {
        const int steps = up(w.k);
        if (!w.codes) return multiply_rows<ADD>(rows, w.panel(w.packed, i, next, count), steps, SIDE, from, into);
        float* sums = ADD ? sums_of(rows) : nullptr;
        const auto raw = [&](int b) { return ADD ? sums + b * AREA : into(b); };
        multiply_rows<false>(rows, w.panel(w.codes, i, next, count), steps, SIDE, from, raw);
        const f16x scales[2] = {load(w.scales + (size_t)i * SIDE), load(w.scales + (size_t)i * SIDE + 16)};
        for (int row = 0; row < rows; row++) {
            float *c = into(row / SIDE) + row % SIDE * SIDE, *part = raw(row / SIDE) + row % SIDE * SIDE;
            for (int j = 0; j < 2; j++) {
                const f16x scaled = load(part + j * 16) * scales[j];
                store(c + j * 16, ADD ? load(c + j * 16) + scaled : scaled);
            }
        }
    }

    template <bool ADD>
    void product(const Pass& p, int index, int which, const Linear& w, Blocks<taken>& from, Blocks<float>& into) {
        shrink(p, index, which, w, from);
        each_panel(p.tokens_count, w.k, up(w.n), [=, &p, &w, &from, &into](int panel, int next, int block, int rows) {
            times<ADD>(w, panel, next, up(w.n), rows, blocks_of(from, block), [&](int b) { return into.block(block + b, panel); });
            for (int b = block; b < block + up(rows); b++) finish(p, index, which, w, panel, b, into.block(b, panel));
        });
    }

    // Adds adapters to a product, multiplies it by its factors, and adds the bias, as the trainer does (`linear.h`).
    void finish(const Pass& p, int index, int which, const Linear& w, int panel, int b, float* c) {
        for (int slot = 0; slot < p.slots; slot++) {
            const LowRank& l = low_rank(p, slot, index, which);
            if (!l.a || !present[(size_t)slot * up(p.tokens_count) + b]) continue;
            multiply<true>(Inputs<taken>{thin.block(b, slot * (thin.panels / p.slots))}, Panel<stored>{l.b + (size_t)panel * up(l.rank) * AREA}, up(l.rank), c, SIDE,
                           std::min(SIDE, p.tokens_count - b * SIDE));
        }
        for (int r = 0; w.factors && r < SIDE; r++)
            for (int j = 0; j < SIDE; j += 16) store(c + r * SIDE + j, load(c + r * SIDE + j) * load(w.factors + panel * SIDE + j));
        for (int r = 0; w.bias && r < SIDE; r++)
            for (int j = 0; j < SIDE; j += 16) store(c + r * SIDE + j, load(c + r * SIDE + j) + load(w.bias + panel * SIDE + j));
    }

    const LowRank& low_rank(const Pass& p, int slot, int index, int which) const {
        return p.low_rank[((size_t)slot * (m.layers + 1) + index) * PLACES + which];
    }

    // thin = A x for the rows of each adapter of the product `w`, zero for the others.
    void shrink(const Pass& p, int index, int which, const Linear& w, Blocks<taken>& from) {
        if (!p.slots) return;
        const int blocks = up(p.tokens_count), steps = up(w.k);
        plan.each(p.slots * blocks, [=, &p, &from](int item) {
            int slot = item / blocks, b = item % blocks;
            const LowRank& l = low_rank(p, slot, index, which);
            if (!l.a || !present[item]) return;
            alignas(64) float c[AREA];
            for (int panel = 0; panel < up(l.rank); panel++) {
                multiply<false>(Inputs<taken>{from.block(b, 0)}, Panel<stored>{l.a + (size_t)panel * steps * AREA}, steps, c, SIDE, SIDE);
                for (int r = 0; r < SIDE; r++) {
                    int row = b * SIDE + r;
                    bool mine = row < p.tokens_count && p.adapters[segment[row]] == slot;
                    taken* to = thin.block(b, slot * (thin.panels / p.slots) + panel) + r * SIDE;
                    for (int j = 0; j < SIDE; j += 16) write(to + j, mine ? load(c + r * SIDE + j) : f16x{});
                }
            }
        });
    }

    // act(gate) * up, of which a panel holds sixteen each, or the squares of 32 ups.
    void gate(const Pass& p, int index, const Linear& w) {
        shrink(p, index, 2, w, h);
        each_panel(p.tokens_count, w.k, up(w.n), [=, &p, &w](int panel, int next, int block, int rows) {
            float* sums = sums_of(rows);
            times<false>(w, panel, next, up(w.n), rows, blocks_of(h, block), [&](int b) { return sums + b * AREA; });
            for (int b = 0; b < up(rows); b++) {
                float* c = sums + b * AREA;
                finish(p, index, 2, w, panel, block + b, c);
                activate(act, block + b, panel, c, std::min(SIDE, rows - b * SIDE));
            }
        });
    }

    // What rows of a panel of the first product become in the inputs of the second.
    void activate(const Blocks<taken>& into, int b, int panel, const float* c, int rows) const {
        const auto squared = [](f16x v) { return select(v < 0.f, f16x{}, v * v); };
        taken* to = m.activation == SQUARED ? into.block(b, panel) : into.block(b, panel / 2) + panel % 2 * 16;
        for (int r = 0; r < rows; r++, c += SIDE, to += SIDE)
            if (m.activation == SQUARED) write(to, squared(load(c))), write(to + 16, squared(load(c + 16)));
            else write(to, gated(load(c), load(c + 16)));
    }

    f16x gated(f16x gate, f16x up) const { return m.activation == CLAMPED ? m.clamped(gate, up) : activated(gate, m.activation == GELU_TANH) * up; }
};
