// Gated delta rule (Yang et al., arXiv:2412.06464): a layer keeps a matrix for each head of values, which every token fades, corrects by what it
// already says of the token's key, and reads with its query. Queries, keys and values are convolved over the last few tokens before.
//
// Both states are one for a sequence, and change with each token: they lie in the sequence's slot, not in its blocks. A token's result is the same
// however a prompt is cut, because tokens follow each other one by one; the heads are independent, and so are the columns of a matrix.
#pragma once
#include "convolution.h"

struct Delta : Convolutions {
    using Convolutions::Convolutions;

    Arena convolved;      // [N, queries, keys, values]; results take the places of values
    Blocks<float> rates;  // [N, fading of each head, and then what it takes of a correction]

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

    // Convolves a token's queries, keys and values, normalises queries and keys, and finds its rates.
    void prepare(const Pass& p, int index, const Layer& l, int row) {
        const Widths w(l);
        const int s = segment[row], before = l.kernel - 1, at = row - p.starts[s];
        const float* kept = state(index, l, p.states[s]);
        float* to = convolved_at(l, row);
        for (int c = 0; c < w.all; c += 16) {
            f16x total = {};
            for (int k = p.context[s] ? 0 : std::max(0, before - at); k <= before; k++) {
                const int from = at - before + k;
                total += load(l.convolution + (size_t)k * up(w.all) * SIDE + c) * (from < 0 ? load(kept + (size_t)(before + from) * w.all + c) : load(qkv.at(row - before + k, c)));
            }
            store(to + c, total * sigmoid(total));
        }
        for (int head = 0; head < 2 * l.key_heads; head++) {
            float* mine = to + head * l.key_width;
            f16x squares = {};
            for (int c = 0; c < l.key_width; c += 16) squares += load(mine + c) * load(mine + c);
            float by = 1.f / std::sqrt(sum(squares) + 1e-6f);
            if (head < l.key_heads) by /= std::sqrt((float)l.key_width);
            for (int c = 0; c < l.key_width; c += 16) store(mine + c, load(mine + c) * by);
        }
        for (int head = 0; head < l.value_heads; head++) {
            const float taken = *qkv.at(row, w.all + w.values + head), step = *qkv.at(row, w.all + w.values + l.value_heads + head) + l.step_bias[head];
            *rates.at(row, head) = std::exp(-l.decay[head] * (step > 20 ? step : std::log1p(std::exp(step))));
            *rates.at(row, l.value_heads + head) = 1.f / (1.f + std::exp(-taken));
        }
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
                step(matrix, keys, own + at_key, own + w.keys + at_key, own + 2 * w.keys + head * l.value_width + c, *rates.at(first + i, head),
                     *rates.at(first + i, l.value_heads + head));
                each_kept(p, s, [&](int tokens, int slot) {
                    if (tokens == p.context[s] + i + 1) std::memcpy(state(index, l, slot) + part, matrix, size);
                });
            }
        }
    }

    // One token. value [16] is replaced by what its query reads.
    static void step(float* matrix, int keys, const float* query, const float* key, float* value, float fading, float taken) {
        f16x said[4] = {}, read[2] = {};
        for (int d = 0; d < keys; d += 4)
            UNROLLED_4 for (int i = 0; i < 4; i++) said[i] += load(matrix + (d + i) * 16) * key[d + i];
        const f16x change = (load(value) - ((said[0] + said[1]) + (said[2] + said[3])) * fading) * taken;
        for (int d = 0; d < keys; d += 2)
            UNROLLED_4 for (int i = 0; i < 2; i++) {
                const f16x now = load(matrix + (d + i) * 16) * fading + change * key[d + i];
                store(matrix + (d + i) * 16, now);
                read[i] += now * query[d + i];
            }
        store(value, read[0] + read[1]);
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

    // The norm of each head's result, times a gate of the token's own.
    void give_gated(const Layer& l, int row) {
        const Widths w(l);
        const float* results = convolved_at(l, row) + 2 * w.keys;
        for (int head = 0; head < l.value_heads; head++) {
            const int first = head * l.value_width;
            f16x squares = {};
            for (int c = first; c < first + l.value_width; c += 16) squares += load(results + c) * load(results + c);
            const float by = ::inverse_rms(squares, l.value_width, m.eps);
            for (int c = first; c < first + l.value_width; c += 16)
                write(mixed.at(row, c), load(results + c) * by * load(l.delta_norm + c - first) * activated(load(qkv.at(row, w.all + c)), false));
        }
    }
};
