// Forward passes in the engine's own order of sums and with its roundings, so that a token's log-prob equals the sampler's bit by
// bit: attention over blocks of 32 positions (look.h), gated activations of sums that were not rounded to bf16, log-probs of
// float32 logits.
#pragma once
#include "attention.h"
#include "linear.h"
#include "look.h"

// gate, up = x W^T (with adapters over one thin product), for the backward pass; y = act(gate) * up, from their values before rounding.
template <class T>
static void linear_gated(const T* x, int rows, int k, const Weight<T>& gate, const Weight<T>& up_, T* y, bool gelu) {
    const int n = gate.n;
    const Weight<T>* both[2] = {&gate, &up_};
    product<T, 2>(
        up(rows), up(n), pieces_of<T>({up(k), up(gate.ranks)}), [&](const Piece& piece, int b, size_t& ld) { return rows_of(gate, x, rows, k, b, piece, ld); },
        [&](const Piece& piece, int panel) { return panel_of(*both[panel % 2], k, piece, panel / 2); },
        from_nothing,
        [&](float* c, int b, int panel) {
            const size_t at = (size_t)b * SIDE * n + panel * SIDE;
            const int high = std::min(SIDE, rows - b * SIDE), columns = std::min(SIDE, n - panel * SIDE);
            for (int which = 0; which < 2; which++) {
                float* sums = c + which * AREA;
                const float* bias = both[which]->bias;
                for (int i = 0; bias && i < AREA; i++)
                    if (i % SIDE < columns) sums[i] += bias[panel * SIDE + i % SIDE];
                put(sums, nullptr, both[which]->y + at, n, high, columns);
            }
            for (int i = 0; i < AREA; i += 16) store(c + i, activated(load(c + i), gelu) * load(c + AREA + i));
            put(c, nullptr, y + at, n, high, columns);
        });
}

// Attention forward. A segment has blocks of its own, beginning with the one that holds its first token. Its ancestors' tokens in
// that block are copied, as the engine copies a block when a sequence forks.
template <class T>
struct Served {
    static constexpr int PAIR = sizeof(float) / sizeof(T);
    const Trees& t;
    const float *q, *k;  // [tokens, heads, dim] and [tokens, kv_heads, dim], with values that T can represent
    const T* v;          // [tokens, kv_heads, dim]
    const int group = t.heads / t.kv_heads, dim = up(t.dim) * SIDE;
    const size_t one = (size_t)2 * dim * SIDE;  // elements of a block of one head: keys, then values
    std::vector<int> base = std::vector<int>(t.segments);  // position of a segment's first token
    std::vector<std::vector<int>> table = std::vector<std::vector<int>>(t.segments);  // block of every 32 positions
    int blocks = 0;

    // kept [tokens, heads, 2], or null: each row's largest score and sum, for the backward pass.
    void attend(T* out, float* kept) {
        for (int s = 0; s < t.segments; s++) {
            const int above = t.parent[s];
            base[s] = above < 0 ? 0 : base[above] + t.length[above];
            if (above >= 0) table[s].assign(table[above].begin(), table[above].begin() + base[s] / SIDE);
            while ((int)table[s].size() < up(base[s] + t.length[s])) table[s].push_back(blocks++);
        }
        static thread_local Arena room;
        room.grow(blocks * one * t.kv_heads * sizeof(T));
        T* cache = (T*)room.data;
        team::each(t.segments * t.kv_heads, [&](int item) { remember(item / t.kv_heads, item % t.kv_heads, cache); });
        std::vector<Rows> items;  // tokens of a segment
        const int most = std::max(1, TOGETHER / group);
        for (int s = 0; s < t.segments; s++)
            for (int first = 0; first < t.length[s]; first += most) items.push_back({s, first, std::min(most, t.length[s] - first)});
        team::each((int)items.size() * t.kv_heads, [&](int item) { attend_some(items[item / t.kv_heads], item % t.kv_heads, cache, out, kept); });
    }

   private:
    T* block(T* cache, int number, int head) const { return cache + ((size_t)number * t.kv_heads + head) * one; }

    void remember(int s, int head, T* cache) const {
        const int from = base[s] / SIDE;
        for (int b = from; b < (int)table[s].size(); b++) std::memset(block(cache, table[s][b], head), 0, one * sizeof(T));
        for (int owner = s; owner >= 0 && base[owner] + t.length[owner] > from * SIDE; owner = t.parent[owner])
            for (int i = std::max(0, from * SIDE - base[owner]); i < t.length[owner]; i++) {
                const int position = base[owner] + i, slot = position % SIDE;
                const size_t at = ((size_t)(t.start[owner] + i) * t.kv_heads + head) * t.dim;
                T *to = block(cache, table[s][position / SIDE], head), *value = to + dim * SIDE + slot / PAIR * dim * PAIR + slot % PAIR;
                for (int c = 0; c < t.dim; c++) {
                    write1(to + (c / PAIR * SIDE + slot) * PAIR + c % PAIR, k[at + c]);
                    value[c * PAIR] = v[at + c];
                }
            }
    }

    // Tokens of a segment, with the heads that share their keys.
    void attend_some(const Rows& rows, int head, T* cache, T* out, float* kept) const {
        const int s = rows.segment, all = rows.count * group, count = (all + ROWS - 1) / ROWS, last = base[s] + rows.first + rows.count;
        auto* tiles = team::room<Queries<T>>(count, 2);
        T* q_room = team::room<T>((size_t)count * ROWS * dim, 0);
        float* out_room = team::room<float>((size_t)count * ROWS * dim, 1);
        std::memset(q_room, 0, (size_t)count * ROWS * dim * sizeof(T));
        for (int tile = 0; tile < count; tile++) {
            Queries<T>& a = tiles[tile];
            a.dim = dim, a.rows = std::min(ROWS, all - tile * ROWS);
            a.q = q_room + (size_t)tile * ROWS * dim, a.out = out_room + (size_t)tile * ROWS * dim;
            a.begin();
            for (int r = 0; r < a.rows; r++) {
                const int row = tile * ROWS + r;
                for (int c = 0; c < t.dim; c++) write1(a.q + r * dim + c, q[place(rows, head, row) + c]);
                a.to[r] = base[s] + rows.first + row / group + 1;
                a.from[r] = t.window ? std::max(0, a.to[r] - t.window) : 0;
            }
        }
        for (int b = tiles[0].from[0] / SPAN * PAIRED; b < up(last); b += PAIRED) {
            Seen<T> seen = {{}, std::min(PAIRED, up(last) - b), b * SIDE};
            for (int i = 0; i < seen.count; i++) seen.block[i] = block(cache, table[s][b + i], head);
            look(tiles, count, seen, t.scale * 1.44269504f);
        }
        for (int row = 0; row < all; row++) {
            const Queries<T>& a = tiles[row / ROWS];
            const int r = row % ROWS;
            T* to = out + place(rows, head, row);
            if (kept) {
                float* mine = kept + place(rows, head, row) / t.dim * 2;
                mine[0] = a.peak[r], mine[1] = a.total[r];
            }
            for (int c = 0; c < t.dim; c += 16) {
                f16x mixed = load(a.out + r * dim + c) * (1.f / a.total[r]);
                if (c + 16 <= t.dim) write(to + c, mixed);
                else
                    for (int i = 0; c + i < t.dim; i++) write1(to + c + i, mixed[i]);
            }
        }
    }
    size_t place(const Rows& rows, int head, int row) const {
        return ((size_t)(t.start[rows.segment] + rows.first + row / group) * t.heads + head * group + row % group) * t.dim;
    }
};

// What is asked of each row of logits: the log-probs of ids [offsets[r], offsets[r + 1]). If filters left less than the vocabulary, the
// first of these are the row's targets [targets[r], targets[r + 1]), and behind them lies what was kept for each, counts[i] for target i.
// A target may have a set instead, sets[set_of[i]] as `width` bytes of bits.
struct Asked {
    const int64_t *offsets, *ids, *targets, *counts, *set_of;  // all but the first two may be null
    const uint8_t* sets;
    int64_t width;

    void among_kept(int row, const float* logits, int vocabulary, float inverse_temperature, float* among) const {
        int64_t at = offsets[row], kept = at + targets[row + 1] - targets[row];
        for (int64_t i = targets[row]; i < targets[row + 1]; kept += counts[i++], at++)
            if (set_of && set_of[i] >= 0) among[i] = (float)among_set(logits, vocabulary, set_of[i], logits[ids[at]], inverse_temperature);
            else if (counts[i]) among[i] = (float)log_probability_among(logits, ids + kept, counts[i], logits[ids[at]], inverse_temperature);
    }
    // As the engine computes it: from a row of logits in which the others are ruled out.
    double among_set(const float* logits, int vocabulary, int64_t set, float logit, float inverse_temperature) const {
        const uint8_t* bits = sets + set * width;
        float* left = team::room<float>(vocabulary + 16, 9);
        for (int i = 0; i < vocabulary; i++) left[i] = i < 8 * width && bits[i / 8] >> i % 8 & 1 ? logits[i] : -INFINITY;
        const float peak = peak_of(left, vocabulary);
        const double mass = mass_of(left, vocabulary, peak, inverse_temperature * 1.44269504f, team::room<double>(vocabulary / SEARCH + 1, 10), [](f16x, f16x) {});
        return log_probability(logit, peak, inverse_temperature, mass);
    }
};

// Computes from hidden states [rows, k] and a head [vocabulary, k] the log-probs that are asked for, those of targets among what was
// kept for them, the log-sum-exp of each row's logits over the temperature, and the entropy.
template <class T>
static void log_probabilities(const T* hidden, int rows, int k, const T* packed, int vocabulary, float inverse_temperature, const Asked& asked,
                              float* found, float* among, float* logsumexp, float* entropy) {
    constexpr int AT_ONCE = 2;  // blocks of rows: the weights are read again for the next, and logits are large
    const size_t width = (size_t)up(vocabulary) * SIDE;
    const float scale = inverse_temperature * 1.44269504f;
    static thread_local Arena room;
    room.grow(AT_ONCE * SIDE * width * sizeof(float));
    float* logits = (float*)room.data;
    for (int begin = 0; begin < rows; begin += AT_ONCE * SIDE) {
        const int count = std::min(AT_ONCE * SIDE, rows - begin);
        product<T>(
            up(count), up(vocabulary), pieces_of<T>({up(k)}),
            [&](const Piece& piece, int b, size_t& ld) { return whole(hidden + (size_t)begin * k, count, k, b * SIDE, piece, ld); },
            [&](const Piece& piece, int panel) { return packed + ((size_t)panel * up(k) + piece.first) * AREA; }, from_nothing,
            [&](const float* c, int b, int panel) { put(c, nullptr, logits + b * SIDE * width + panel * SIDE, width, SIDE, SIDE); });
        team::each(count, [&](int r) {
            const float* mine = logits + r * width;
            f16x moment = {};
            const float peak = peak_of(mine, vocabulary);
            const double mass = mass_of(mine, vocabulary, peak, scale, team::room<double>(vocabulary / SEARCH + 1, 2),
                                        [&](f16x term, f16x below) { moment += term * max16(below, splat(-1e30f)); });
            for (int64_t i = asked.offsets[begin + r]; i < asked.offsets[begin + r + 1]; i++)
                found[i] = (float)log_probability(mine[asked.ids[i]], peak, inverse_temperature, mass);
            if (asked.targets) asked.among_kept(begin + r, mine, vocabulary, inverse_temperature, among);
            logsumexp[begin + r] = (float)((double)peak * inverse_temperature + std::log(mass));
            entropy[begin + r] = (float)(std::log(mass) - (double)sum(moment) * inverse_temperature / mass);
        });
    }
}
