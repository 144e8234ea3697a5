// A mixture of experts: the router's choice, and the products of each expert with the rows that chose it.
#pragma once
#include "recurrence.h"
#include "routing.h"

struct Mixture : Recurrent {
    using Recurrent::Recurrent;

    std::vector<int> chosen;         // [N, K], best first
    std::vector<float> weights;      // [N, K]
    std::vector<int> place;          // [N, K]: row of each assignment in the blocks below; those of one expert are adjacent
    std::vector<int> count, first;   // [E]: its assignments, and its first block
    Blocks<taken> gathered, inner;
    Blocks<float> told;

    void mix(const Pass& p, const Layer& l) {
        const int n = p.tokens_count, k = l.chosen, most = n * k / SIDE + std::min(l.experts, n * k);
        plan.each(1, [=](int) {
            chosen.resize((size_t)n * k), weights.resize((size_t)n * k), place.resize((size_t)n * k);
            gathered.size(most * SIDE, m.hidden), inner.size(most * SIDE, l.down.k), told.size(most * SIDE, m.hidden);
        });
        plan.each(n, [=, &p, &l](int row) { choose(p, l, row); });
        plan.each(1, [=, &l](int) { settle(n, l); });
        plan.each(n, [=](int row) {
            for (int i = 0; i < k; i++)
                for (int c = 0; c < m.hidden; c += SIDE) std::memcpy(gathered.at(place[row * k + i], c), h.at(row, c), SIDE * sizeof(taken));
        });
        each_expert(l, l.gate_up, [=](const auto& multiplied, int panel, int b, int rows) {
            alignas(64) float c[AREA];
            multiplied(gathered.block(b, 0), c);
            activate(inner, b, panel, c, rows);
        });
        each_expert(l, l.down, [=](const auto& multiplied, int panel, int b, int) { multiplied(inner.block(b, 0), told.block(b, panel)); });
        plan.each(n, [=](int row) {
            for (int c = 0; c < m.hidden; c += 16)
                store(x.at(row, c), load(x.at(row, c)) + m.residual_scale * weighed([&](int i) { return load(told.at(place[row * k + i], c)); }, &weights[row * k], k));
        });
    }

    // The expert that serves every token, added to x.
    void share(const Pass& p, int index, const Layer& l) {
        gate(p, index, l.shared_gate_up);
        product<false>(p, index, 3, l.shared_down, act, side);
        plan.each(p.tokens_count, [=, &l](int row) {
            f16x told = {};
            for (int c = 0; l.shared_gate && c < up(m.hidden) * SIDE; c += 16) told += read(h.at(row, c)) * load(l.shared_gate + c);
            const float by = m.residual_scale * (l.shared_gate ? sigmoid(splat(sum(told)))[0] : 1);
            for (int c = 0; c < m.hidden; c += 16) store(x.at(row, c), load(x.at(row, c)) + load(side.at(row, c)) * by);
        });
    }

    void choose(const Pass& p, const Layer& l, int row) {
        const int k = l.chosen;
        float score[MOST_EXPERTS];
        score_experts([&](int c) { return read(h.at(row, c)); }, l.router, up(m.hidden) * SIDE, l.experts, score);
        for (int e = 0; l.router_bias && e < l.experts; e++) score[e] += l.router_bias[e];
        if (l.sigmoid) choose_by_sigmoid(l, score, &chosen[row * k], &weights[row * k]);
        else choose_experts(score, l.experts, k, l.normalise_chosen, false, &chosen[row * k], &weights[row * k]);
        for (int i = 0; p.routing && i < k; i++) p.routing[((size_t)row * m.mixtures + l.mixture) * k + i] = chosen[row * k + i];
    }

    // Experts with the largest sigmoids, a bias of each added for the choice alone; best first, and the first among equals.
    static void choose_by_sigmoid(const Layer& l, float* score, int* which, float* by) {
        float total = l.chosen_least;
        bool taken[MOST_EXPERTS] = {};
        for (int e = 0; e < l.experts; e++) score[e] = 1.f / (1.f + std::exp(-score[e]));
        for (int i = 0; i < l.chosen; i++) {
            int best = -1;
            const auto rank = [&](int e) { return score[e] + (l.choice_bias ? l.choice_bias[e] : 0); };
            for (int e = 0; e < l.experts; e++)
                if (!taken[e] && (best < 0 || rank(e) > rank(best))) best = e;
            taken[best] = true, which[i] = best;
            total += by[i] = score[best];
        }
        for (int i = 0; i < l.chosen; i++) by[i] *= (l.normalise_chosen ? 1 / total : 1) * l.chosen_scale;
    }

    // Gives every assignment a row, expert by expert; each expert begins a new block.
    void settle(int n, const Layer& l) {
        count.assign(l.experts, 0), first.assign(l.experts, 0);
        for (int i = 0; i < n * l.chosen; i++) count[chosen[i]]++;
        for (int e = 1; e < l.experts; e++) first[e] = first[e - 1] + up(count[e - 1]);
        std::vector<int> next(l.experts, 0);
        for (int i = 0; i < n * l.chosen; i++) place[i] = first[chosen[i]] * SIDE + next[chosen[i]]++;
    }

    // Calls f(multiplied, panel, block, rows) for every panel of every expert that has rows, block by block; multiplied(from, into) is its product.
    template <class F>
    void each_expert(const Layer& l, const Linear& w, const F& f) {
        const int panels = up(w.n);
        plan.each(l.experts * panels, [=, &l, &w](int item, int next) {
            int expert = item / panels, panel = item % panels;
            for (int b = 0; b < up(count[expert]); b++) {
                const int rows = std::min(SIDE, count[expert] - b * SIDE);
                const auto multiplied = [&](const taken* from, float* into) {
                    times<false>(w, item, b ? item : next, l.experts * panels, rows, [=](int) { return Inputs<taken>{from}; }, [=](int) { return into; });
                    for (int i = 0; w.bias && i < rows * SIDE; i += 16) store(into + i, load(into + i) + load(w.bias + item * SIDE + i % SIDE));
                };
                f(multiplied, panel, first[expert] + b, rows);
            }
        });
    }
};
