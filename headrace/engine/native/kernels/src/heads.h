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
            const int d = m.head_dim, half = d / 2, s = segment[row];
            const bool chunk = p.starts[s + 1] - p.starts[s] > 1;
            const float *cos = m.cos[l.rotary] + (size_t)position[row] * half, *sin = m.sin[l.rotary] + (size_t)position[row] * half;
            if (chunk) await(p, index, row);
            const float over_q = l.whole_norm ? inverse_rms_of(row, 0, m.heads * d) : 0;
            const float over_k = l.whole_norm ? inverse_rms_of(row, m.heads * d, m.kv_heads * d) : 0;
            alignas(64) float in[512], out[512];
            for (int head = 0; head < m.heads + 2 * m.kv_heads; head++) {
                for (int c = 0; c < d; c += 16) store(in + c, load(qkv.at(row, head * d + c)));
                const float* from = in;
                if (head < m.heads + m.kv_heads) {
                    const bool query = head < m.heads;
                    if (const float* weight = query ? l.q_norm : l.k_norm) {
                        if (!l.whole_norm) normalise_head(in, inverse_rms_of(row, head * d, d), weight);
                        else normalise_head(in, query ? over_q : over_k, weight + (query ? head : head - m.heads) * d);
                    }
                    for (int c = 0; c < half; c++) {
                        const Turned both = turned(in[c], in[c + half], cos[c], sin[c]);
                        out[c] = both.first, out[c + half] = both.second;
                    }
                    from = out;
                }
                for (int c = 0; c < d; c += 16) write(ready(row, head) + c, load(from + c));
            }
            for (int head = 0; chunk && head < m.kv_heads; head++) remember(p, index, row, head);
        });
    }

    stored* last_block(const Pass& p, int index, int row, int head) const {
        return keys(index, p.tables[(size_t)segment[row] * p.width + position[row] / SIDE], head);
    }

    void remember(const Pass& p, int index, int row, int head) const {
        const int slot = position[row] % SIDE;
        stored* block = last_block(p, index, row, head);
        const taken *key = ready(row, m.heads + head), *value = ready(row, m.heads + m.kv_heads + head);
        for (int c = 0; c < m.head_dim; c++) block[(c / PAIR * SIDE + slot) * PAIR + c % PAIR] = kept(key[c]);
        stored* to = block + dim * SIDE + slot / PAIR * dim * PAIR + slot % PAIR;
        for (int c = 0; c < m.head_dim; c++) to[c * PAIR] = kept(value[c]);
    }

    // A token's key and value are stored to distant cache lines, which are prefetched while queries are rotated.
    void await(const Pass& p, int index, int row) const {
        const int slot = position[row] % SIDE;
        for (int head = 0; head < m.kv_heads; head++) {
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
    void normalise_head(float* in, float by, const float* weight) const {
        for (int c = 0; c < m.head_dim; c += 16) store(in + c, load(in + c) * by * load(weight + c));
    }

    // One job takes an item and several heads: their keys and values are adjacent, and long reads are faster. With few items every
    // head is a job of its own.
    void attend(const Pass& p, int index, const Layer& l) {
        const int jobs = (int)items.size() < 4 * team.size ? m.kv_heads : 1, heads = m.kv_heads / jobs;
        plan.each(items.size() * jobs, [=, &p, &l](int i) {
            thread_local Arena room;
            const int tiles = (group + ROWS - 1) / ROWS;
            const size_t each = sizeof(float) + sizeof(taken);
            room.grow((size_t)2 * heads * tiles * (sizeof(Queries<taken>) + ROWS * dim * each));
            const Item& item = items[i / jobs];
            Rows rows = {(Queries<taken>*)room.data, heads * tiles, i % jobs * heads, tiles};
            char* behind = room.data + sizeof(Queries<taken>) * 2 * rows.count;
            for (int t = 0; t < 2 * rows.count; t++, behind += ROWS * dim * each) {
                rows.first[t].dim = dim, rows.first[t].out = (float*)behind, rows.first[t].q = (taken*)(behind + ROWS * dim * 4);
            }
            if (item.count) attend_together(p, index, l, item, rows);
            else attend_chunk(p, index, l, item, rows);
        });
    }

    // The query rows of an item: one `Queries` for each of its key-value heads, more if a group of heads exceeds a tile. As
    // many again follow, for the sequences one by one.
    struct Rows {
        Queries<taken>* first;
        int count, kv_head, tiles;
        int key_head(int t) const { return kv_head + t / tiles; }
    };
    int first_head(const Rows& rows, int t) const { return rows.key_head(t) * group + t % rows.tiles * ROWS; }
    int heads_of(const Rows& rows, int t) const { return std::min(ROWS, group - t % rows.tiles * ROWS); }

    void take(Queries<taken>& a, int r, int row, int head, int window) const {
        std::memcpy(a.q + r * dim, ready(row, head), dim * sizeof(taken));
        a.to[r] = position[row] + 1;
        a.from[r] = window ? std::max(0, a.to[r] - window) : 0;
    }
    void give(const Queries<taken>& a, int r, int row, int head) {
        for (int c = 0; c < m.head_dim; c += 16) write(mixed.at(row, head * m.head_dim + c), load(a.out + r * dim + c) * (1.f / a.total[r]));
    }
    // Blocks [begin, end) of a sequence. `fresh`: the token whose key and value belong into the last one and are not stored
    // yet, -1 if there is none. While a block is read, the next one is prefetched.
    void look_at(Queries<taken>* first, const Rows& rows, const Pass& p, int index, int s, int begin, int end, int fresh) const {
        const int32_t* table = p.tables + (size_t)s * p.width;
        const size_t one = 2 * dim * SIDE;
        for (int b = begin; b < end; b++) {
            for (int t = 0; t < rows.count; t++) {
                const int head = t / rows.tiles;
                stored* k = keys(index, table[b], rows.kv_head + head);
                const stored* next = nullptr;
                if (fresh >= 0 && (t + 1) % rows.tiles == 0) {
                    if (t + 1 < rows.count) next = k + one;
                    else next = b + 1 < end ? keys(index, table[b + 1], rows.kv_head) : k;
                }
                if (t % rows.tiles == 0 && b == end - 1 && fresh >= 0) remember(p, index, fresh, rows.kv_head + head);
                look(first[t], k, k + dim * SIDE, b * SIDE, m.layer[index].scale * 1.44269504f, next);
            }
        }
    }

    void attend_chunk(const Pass& p, int index, const Layer& l, const Item& item, const Rows& rows) {
        int first = p.starts[item.place] + item.first;
        for (int t = 0; t < rows.count; t++) {
            Queries<taken>& a = rows.first[t];
            int heads = heads_of(rows, t);
            a.rows = item.tokens * heads;
            for (int r = 0; r < a.rows; r++) take(a, r, first + r / heads, first_head(rows, t) + r % heads, l.window);
            a.begin();
        }
        const Queries<taken>& any = rows.first[0];
        const bool single = p.starts[item.place + 1] - p.starts[item.place] == 1;
        look_at(rows.first, rows, p, index, item.place, any.from[0] / SIDE, up(any.to[any.rows - 1]), single ? first : -1);
        for (int t = 0; t < rows.count; t++)
            for (int r = 0, heads = heads_of(rows, t); r < rows.first[t].rows; r++) give(rows.first[t], r, first + r / heads, first_head(rows, t) + r % heads);
    }

    // Attends with several sequences to the blocks that they share, then with each to its own.
    void attend_together(const Pass& p, int index, const Layer& l, const Item& item, const Rows& rows) {
        int low = item.shared;
        for (int t = 0; t < rows.count; t++) {
            Queries<taken>& a = rows.first[t];
            int heads = heads_of(rows, t);
            a.rows = item.count * heads;
            for (int r = 0; r < a.rows; r++) {
                take(a, r, p.starts[order[item.place + r / heads]], first_head(rows, t) + r % heads, l.window);
                low = std::min(low, a.from[r] / SIDE);
            }
            a.begin();
        }
        look_at(rows.first, rows, p, index, order[item.place], low, item.shared, -1);
        for (int i = 0; i < item.count; i++) {
            int s = order[item.place + i];
            Queries<taken>* own = rows.first + rows.count;
            for (int t = 0; t < rows.count; t++) own[t].split(rows.first[t], i * heads_of(rows, t), heads_of(rows, t));
            look_at(own, rows, p, index, s, std::max(item.shared, own[0].from[0] / SIDE), up(own[0].to[0]), p.starts[s]);
            for (int t = 0; t < rows.count; t++)
                for (int r = 0; r < own[t].rows; r++) give(own[t], r, p.starts[s], first_head(rows, t) + r);
        }
    }
};
