// Layers that keep a matrix for each head of values, which every token fades, adds its value to at its key, and reads with its query. Queries, keys and
// values are convolved over the last few tokens before.
//
// The gated delta rule (Yang et al., arXiv:2412.06464) takes off the value what the matrix already says of the key, and normalises queries and keys. A
// state space (Mamba 2, arXiv:2405.21060) adds the value as it is: its keys are what is called B there, its queries C, its values x.
//
// Both states are one for a sequence, and change with each token: they lie in the sequence's slot, not in its blocks. A token's result is the same
// however a prompt is cut, because tokens follow each other one by one; the heads are independent, and so are the columns of a matrix.
#pragma once
#include "convolution.h"

struct Recurrent : Convolutions {
    using Convolutions::Convolutions;

    Arena convolved;      // [N, queries, keys, values]; results take the places of values
    Blocks<float> rates;  // [N, fading of each head, and then what it takes of a value]

    // Widths of a layer: of all queries (and of all keys), of all values, and of what is convolved.
    struct Widths {
        int keys, values, all;
        explicit Widths(const Layer& l) : keys(l.key_heads * l.key_width), values(l.value_heads * l.value_width), all(2 * keys + values) {}
    };

    void follow(const Pass& p, int index, const Layer& l) {
        const int n = p.tokens_count, heads = l.value_heads;
        plan.each(1, [=, &l](int) { convolved.grow((size_t)n * Widths(l).all * sizeof(float)), rates.size(n, 2 * heads); });
        plan.each(n, [=, &p, &l](int row) { prepare(p, index, l, row); });
        plan.each(p.segments * (heads + 1), [=, &p, &l](int item) {
            const int s = item / (heads + 1), head = item % (heads + 1);
            if (head < heads) go_on(p, index, l, s, head);
            else move_inputs(p, index, l, s);
        });
        plan.each(n, [=, &l](int row) { give_gated(l, row); });
    }

    float* convolved_at(const Layer& l, int row) const { return (float*)convolved.data + (size_t)row * Widths(l).all; }

    // The state of a layer in a slot: inputs of the last tokens [kernel - 1, all], the oldest first, and then matrices
    // [value_heads][value_width / 16][key_width][16].
    float* state(int index, const Layer& l, int slot) const {
        const Widths w(l);
        const size_t each = (size_t)(l.kernel - 1) * w.all + (size_t)l.key_width * w.values;
        return cache.states + slot * cache.state_size + m.layer[index].place * each;
    }

    // Convolves a token's queries, keys and values, normalises queries and keys of a delta rule, and finds its rates.
    void prepare(const Pass& p, int index, const Layer& l, int row) {
        const Widths w(l);
        const int s = segment[row], before = l.kernel - 1, at = row - p.starts[s];
        const float* kept = state(index, l, p.states[s]);
        float* to = convolved_at(l, row);
        for (int c = 0; c < w.all; c += 16) {
            f16x total = l.convolution_bias ? load(l.convolution_bias + c) : f16x{};
            for (int k = p.context[s] ? 0 : std::max(0, before - at); k <= before; k++) {
                const int from = at - before + k;
                total += load(l.convolution + (size_t)k * up(w.all) * SIDE + c) * (from < 0 ? load(kept + (size_t)(before + from) * w.all + c) : load(qkv.at(row - before + k, c)));
            }
            store(to + c, total * sigmoid(total));
        }
        for (int head = 0; l.corrects && head < 2 * l.key_heads; head++) normalise_key(l, to + head * l.key_width, head < l.key_heads);
        for (int head = 0; head < l.value_heads; head++) find_rates(l, w, row, head);
    }

    static void normalise_key(const Layer& l, float* mine, bool query) {
        f16x squares = {};
        for (int c = 0; c < l.key_width; c += 16) squares += load(mine + c) * load(mine + c);
        float by = 1.f / std::sqrt(sum(squares) + 1e-6f);
        if (query) by /= std::sqrt((float)l.key_width);
        for (int c = 0; c < l.key_width; c += 16) store(mine + c, load(mine + c) * by);
    }

    // A state space takes as much of a value as it fades for: both follow from the step of time.
    void find_rates(const Layer& l, const Widths& w, int row, int head) {
        const int told = w.all + w.values + head;
        const float step = *qkv.at(row, l.corrects ? told + l.value_heads : told) + l.step_bias[head];
        const float time = std::min(std::max(step > 20 ? step : std::log1p(std::exp(step)), l.shortest_step), l.longest_step);  // not a number stays none
        *rates.at(row, head) = std::exp(-l.decay[head] * time);
        *rates.at(row, l.value_heads + head) = l.corrects ? 1.f / (1.f + std::exp(-*qkv.at(row, told))) : time;
    }

    // All tokens of a segment through the matrix of one head, sixteen columns at a time, which stay in the first-level cache.
    void go_on(const Pass& p, int index, const Layer& l, int s, int head) {
        const Widths w(l);
        const int keys = l.key_width, at_key = head / (l.value_heads / l.key_heads) * keys, first = p.starts[s], count = p.starts[s + 1] - first;
        const size_t matrices = (size_t)(l.kernel - 1) * w.all + (size_t)head * keys * l.value_width;
        for (int c = 0; c < l.value_width; c += 16) {
            const size_t part = matrices + (size_t)c * keys, size = (size_t)keys * 16 * sizeof(float);
            float* matrix = state(index, l, p.states[s]) + part;
            if (!p.context[s]) std::memset(matrix, 0, size);
            for (int i = 0; i < count; i++) {
                float* own = convolved_at(l, first + i);
                const Token token = {own + at_key, own + w.keys + at_key, own + 2 * w.keys + head * l.value_width + c, *rates.at(first + i, head),
                                     *rates.at(first + i, l.value_heads + head)};
                if (l.corrects) step<true>(matrix, keys, token, 0);
                else step<false>(matrix, keys, token, l.skip[head]);
                each_kept(p, s, [&](int tokens, int slot) {
                    if (tokens == p.context[s] + i + 1) std::memcpy(state(index, l, slot) + part, matrix, size);
                });
            }
        }
    }

    struct Token {
        const float *query, *key;
        float* value;  // [16], replaced by what the query reads
        float fading, taken;
    };

    // `skip`: part of a value that a state space gives beside what is read.
    template <bool CORRECTS>
    static void step(float* matrix, int keys, const Token& t, float skip) {
        f16x said[4] = {}, read[2] = {};
        for (int d = 0; CORRECTS && d < keys; d += 4)
            UNROLLED_4 for (int i = 0; i < 4; i++) said[i] += load(matrix + (d + i) * 16) * t.key[d + i];
        const f16x value = load(t.value), change = (CORRECTS ? value - ((said[0] + said[1]) + (said[2] + said[3])) * t.fading : value) * t.taken;
        for (int d = 0; d < keys; d += 2)
            UNROLLED_4 for (int i = 0; i < 2; i++) {
                const f16x now = load(matrix + (d + i) * 16) * t.fading + change * t.key[d + i];
                store(matrix + (d + i) * 16, now);
                read[i] += now * t.query[d + i];
            }
        const f16x told = read[0] + read[1];
        store(t.value, CORRECTS ? told : told + value * skip);
    }

    // f(tokens that the state has seen, slot) for all states of a segment that are kept in other slots.
    template <class F>
    static void each_kept(const Pass& p, int s, const F& f) {
        for (int i = 0; i < p.kept_count; i++)
            if (p.kept[3 * i] == s) f(p.kept[3 * i + 1], p.kept[3 * i + 2]);
    }

    // The inputs of the last tokens, for the next pass and in the states that are kept.
    void move_inputs(const Pass& p, int index, const Layer& l, int s) {
        const int wide = Widths(l).all, before = l.kernel - 1, first = p.starts[s];
        const float* old = state(index, l, p.states[s]);
        const auto fill = [&](float* to, int count) {
            for (int k = 0; k < before; k++, to += wide) {
                const int from = count - before + k;
                for (int c = 0; c < wide; c += 16)
                    store(to + c, from >= 0 ? load(qkv.at(first + from, c)) : p.context[s] ? load(old + (size_t)(before + from) * wide + c) : f16x{});
            }
        };
        each_kept(p, s, [&](int tokens, int slot) { fill(state(index, l, slot), tokens - p.context[s]); });
        fill(state(index, l, p.states[s]), p.starts[s + 1] - first);  // last: what it writes over is read by nobody after it
    }

    // The results under a norm, if there is one, and times a gate of the token's own before or after it: of a delta rule the norm of each head, of a state
    // space over the heads of one key.
    void give_gated(const Layer& l, int row) {
        const Widths w(l);
        float* results = convolved_at(l, row) + 2 * w.keys;
        const auto gate = [&](int c) { return activated(load(qkv.at(row, w.all + c)), false); };
        const int wide = l.corrects ? l.value_width : w.values / l.key_heads;
        for (int c = 0; !l.gate_last && c < w.values; c += 16) store(results + c, load(results + c) * gate(c));
        for (int first = 0; first < w.values; first += wide) {
            f16x squares = {};
            for (int c = first; c < first + wide; c += 16) squares += load(results + c) * load(results + c);
            const float by = ::inverse_rms(squares, wide, m.eps);
            for (int c = first; c < first + wide; c += 16) {
                const f16x normed = l.result_norm ? load(results + c) * by * load(l.result_norm + (l.corrects ? c - first : c)) : load(results + c);
                write(mixed.at(row, c), l.gate_last ? normed * gate(c) : normed);
            }
        }
    }
};
