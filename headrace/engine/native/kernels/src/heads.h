// Attention from the product q, k, v on: rotation, the cache, and the distribution of blocks over threads.
#pragma once
#include "dense.h"

struct Heads : Dense {
    using Dense::Dense;

    // Rotary embedding (and norms of queries and keys) of every head. Keys and values of longer segments are stored in the
    // cache, because the whole segment reads them. Those of a single token are stored by the item that attends for it and reads the
    // block anyway.
    void rotate(const Pass& p, int index, const Layer& l) {
        plan.each(p.tokens_count, [=, &p, &l](int row) {
            const int d = l.head_dim, half = l.turned / 2, s = segment[row], own = l.borrows ? 0 : l.kv_heads;
            const bool chunk = p.starts[s + 1] - p.starts[s] > 1 && own;
            const float *cos = m.cos[l.rotary] + (size_t)position[row] * half, *sin = m.sin[l.rotary] + (size_t)position[row] * half;
            if (chunk) await(p, index, row);
            const float over_q = l.whole_norm ? inverse_rms_of(row, 0, m.heads * d) : 0;
            const float over_k = l.whole_norm ? inverse_rms_of(row, m.heads * d, own * d) : 0;
            alignas(64) float in[512], out[512];
            for (int head = 0; head < m.heads + 2 * own; head++) {
                for (int c = 0; c < d; c += 16) store(in + c, load(qkv.at(row, head * d + c)));
                const float* from = in;
                if (head < m.heads + own) {
                    const bool query = head < m.heads;
                    if (const float* weight = query ? l.q_norm : l.k_norm) {
                        if (!l.whole_norm) normalise_head(in, d, inverse_rms_of(row, head * d, d), weight);
                        else normalise_head(in, d, query ? over_q : over_k, weight + (query ? head : head - m.heads) * d);
                    }
                    if (m.neighbours)
                        for (int c = 0; c < half; c++) {
                            const Turned both = turned(in[2 * c], in[2 * c + 1], cos[c], sin[c]);
                            out[2 * c] = both.first, out[2 * c + 1] = both.second;
                        }
                    else
                        for (int c = 0; c < half; c++) {
                            const Turned both = turned(in[c], in[c + half], cos[c], sin[c]);
                            out[c] = both.first, out[c + half] = both.second;
                        }
                    for (int c = l.turned; c < d; c++) out[c] = in[c];
                    if (m.query_factors && query)
                        for (int c = 0; c < d; c++) out[c] *= m.query_factors[position[row]];
                    from = out;
                } else if (l.v_norm) normalise_head(in, d, inverse_rms_of(row, head * d, d), l.v_norm);
                for (int c = 0; c < dim_of(l); c += 16) write(ready(l, row, head) + c, c < d ? load(from + c) : f16x{});
            }
            for (int head = 0; chunk && head < own; head++) remember(p, index, row, head);
        });
    }

    stored* last_block(const Pass& p, int index, int row, int head) const {
        return keys(index, p.tables[(size_t)segment[row] * p.width + position[row] / SIDE], head);
    }

    void remember(const Pass& p, int index, int row, int head) const {
        const Layer& l = m.layer[index];
        const int slot = position[row] % SIDE, dim = dim_of(l);
        stored* block = last_block(p, index, row, head);
        const taken *key = ready(l, row, m.heads + head), *value = ready(l, row, m.heads + l.kv_heads + head);
        for (int c = 0; c < l.head_dim; c++) block[(c / PAIR * SIDE + slot) * PAIR + c % PAIR] = kept(key[c]);
        stored* to = block + dim * SIDE + slot / PAIR * dim * PAIR + slot % PAIR;
        for (int c = 0; c < l.head_dim; c++) to[c * PAIR] = kept(value[c]);
    }

    // A token's key and value are stored to distant cache lines, which are prefetched while queries are rotated.
    void await(const Pass& p, int index, int row) const {
        const int slot = position[row] % SIDE, dim = dim_of(m.layer[index]);
        for (int head = 0; head < m.layer[index].kv_heads; head++) {
            const stored* block = last_block(p, index, row, head);
            for (int pair = 0; pair < dim / PAIR; pair++) __builtin_prefetch(block + (pair * SIDE + slot) * PAIR, 1);
            for (int d = 0; d < dim; d += 16) __builtin_prefetch(block + dim * SIDE + (slot / PAIR * dim + d) * PAIR, 1);
        }
    }

    float inverse_rms_of(int row, int column, int count) const {
        f16x squares = {};
        for (int c = 0; c < count; c += 16) squares += load(qkv.at(row, column + c)) * load(qkv.at(row, column + c));
        return ::inverse_rms(squares, count, m.eps);
    }
    static void normalise_head(float* in, int count, float by, const float* weight) {
        for (int c = 0; c < count; c += 16) store(in + c, load(in + c) * by * load(weight + c));
    }

    // One job takes an item and several heads: their keys and values are adjacent, and long reads are faster. With few items every
    // head is a job of its own.
    void attend(const Pass& p, int index, const Layer& l) {
        const int jobs = (int)items.size() < 4 * team.size ? l.kv_heads : 1, heads = l.kv_heads / jobs, group = m.heads / l.kv_heads, dim = dim_of(l);
        plan.each(items.size() * jobs, [=, &p, &l](int i) {
            thread_local Arena room;
            const Item& item = items[i / jobs];
            const int tiles = (std::max(1, item.count) * item.tokens * group + ROWS - 1) / ROWS, own = item.count ? (group + ROWS - 1) / ROWS : 0;
            const size_t each = sizeof(float) + sizeof(taken), count = heads * (tiles + own);
            room.grow(count * (sizeof(Queries<taken>) + ROWS * dim * each));
            Rows rows = {(Queries<taken>*)room.data, heads, i % jobs * heads, tiles, group};
            char* behind = room.data + sizeof(Queries<taken>) * count;
            for (size_t t = 0; t < count; t++, behind += ROWS * dim * each) {
                rows.first[t].dim = dim, rows.first[t].out = (float*)behind, rows.first[t].q = (taken*)(behind + ROWS * dim * 4);
            }
            if (item.count) attend_together(p, index, l, item, rows, {rows.first + heads * tiles, heads, rows.kv_head, own, group});
            else attend_chunk(p, index, l, item, rows);
        });
    }

    // The query rows of an item: `tiles` for each of its key-value heads, which hold the heads of the group of one token after another.
    struct Rows {
        Queries<taken>* first;
        int heads, kv_head, tiles, group;
    };
    // f(tile, row in it, token, head) for all rows of `tokens` tokens; the tiles know how many rows they have.
    template <class F>
    void each_row(const Rows& rows, int tokens, const F& f) const {
        for (int h = 0; h < rows.heads; h++)
            for (int t = 0; t < rows.tiles; t++) {
                Queries<taken>& a = rows.first[h * rows.tiles + t];
                a.rows = std::min(ROWS, tokens * rows.group - t * ROWS);
                for (int r = 0; r < a.rows; r++) f(a, r, (t * ROWS + r) / rows.group, (rows.kv_head + h) * rows.group + (t * ROWS + r) % rows.group);
            }
    }
    // A sink is the first score of its rows.
    void begin(const Rows& rows, int tokens, const Layer& l) const {
        for (int t = 0; t < rows.heads * rows.tiles; t++) rows.first[t].begin();
        if (l.sinks) each_row(rows, tokens, [&](Queries<taken>& a, int r, int, int head) { a.peak[r] = l.sinks[head] * 1.44269504f, a.total[r] = 1; });
    }

    void take(Queries<taken>& a, const Layer& l, int r, int row, int head) const {
        std::memcpy(a.q + r * a.dim, ready(l, row, head), a.dim * sizeof(taken));
        a.to[r] = position[row] + 1;
        a.from[r] = l.window ? std::max(0, a.to[r] - l.window) : 0;
    }
    void give(const Queries<taken>& a, const Layer& l, int r, int row, int head) {
        const int first = head * l.head_dim, gates = (m.heads + 2 * l.kv_heads) * l.head_dim;
        const f16x by = splat(1.f / a.total[r]) * (l.head_gated ? sigmoid(splat(*qkv.at(row, gates + head))) : splat(1));
        for (int c = 0; c < l.head_dim; c += 16) {
            const f16x given = load(a.out + r * a.dim + c) * by;
            write(mixed.at(row, first + c), l.gated ? given * sigmoid(load(qkv.at(row, gates + first + c))) : given);
        }
    }
    // Blocks [begin, end) of a sequence, and the one before if the first is the second of a pair. `fresh`: the token whose key and value
    // belong into the last one and are not stored yet, -1 if there is none. While blocks are read, the next ones are prefetched.
    void look_at(const Rows& rows, const Pass& p, int index, int s, int begin, int end, int fresh) const {
        const int32_t* table = p.tables + (size_t)s * p.width;
        for (int b = begin / PAIRED * PAIRED; b < end; b += PAIRED)
            for (int h = 0; h < rows.heads; h++) {
                Seen<stored> seen = {{}, std::min(PAIRED, end - b), b * SIDE};
                for (int i = 0; i < seen.count; i++) seen.block[i] = keys(index, table[b + i], rows.kv_head + h);
                if (fresh >= 0) {
                    if (b + PAIRED >= end && !m.layer[index].borrows) remember(p, index, fresh, rows.kv_head + h);
                    if (h + 1 < rows.heads) seen.next = keys(index, table[b], rows.kv_head + h + 1);
                    else seen.next = b + PAIRED < end ? keys(index, table[b + PAIRED], rows.kv_head) : seen.block[0];
                }
                look(rows.first + h * rows.tiles, rows.tiles, seen, m.layer[index].scale * 1.44269504f, m.layer[index].cap * 1.44269504f);
            }
    }

    void attend_chunk(const Pass& p, int index, const Layer& l, const Item& item, const Rows& rows) {
        const int first = p.starts[item.place] + item.first;
        each_row(rows, item.tokens, [&](Queries<taken>& a, int r, int token, int head) { take(a, l, r, first + token, head); });
        begin(rows, item.tokens, l);
        const bool single = p.starts[item.place + 1] - p.starts[item.place] == 1;
        look_at(rows, p, index, item.place, rows.first[0].from[0] / SIDE, up(position[first + item.tokens - 1] + 1), single ? first : -1);
        each_row(rows, item.tokens, [&](Queries<taken>& a, int r, int token, int head) { give(a, l, r, first + token, head); });
    }

    // Attends with several sequences to the blocks that they share, then with each to its own.
    void attend_together(const Pass& p, int index, const Layer& l, const Item& item, const Rows& rows, const Rows& own) {
        int low = item.shared;
        each_row(rows, item.count, [&](Queries<taken>& a, int r, int sequence, int head) {
            take(a, l, r, p.starts[order[item.place + sequence]], head);
            low = std::min(low, a.from[r] / SIDE);
        });
        begin(rows, item.count, l);
        look_at(rows, p, index, order[item.place], low, item.shared, -1);
        for (int i = 0; i < item.count; i++) {
            const int s = order[item.place + i];
            for (int h = 0; h < rows.heads; h++)
                for (int t = 0; t < own.tiles; t++)
                    own.first[h * own.tiles + t].split(rows.first[h * rows.tiles + t], i * rows.group, std::min(ROWS, rows.group - t * ROWS));
            look_at(own, p, index, s, std::max(item.shared, own.first[0].from[0] / SIDE), up(own.first[0].to[0]), p.starts[s]);
            each_row(own, 1, [&](Queries<taken>& a, int r, int, int head) { give(a, l, r, p.starts[s], head); });
        }
    }
};
