// The data of a pass and its distribution over threads, made before the threads begin.
#pragma once
#include <vector>

#include "decoder.h"
#include "ready.h"
#include "team.h"

template <class T>
struct Blocks {  // [rows / 32][panels][32][32]; grows; zero until written
    Arena arena;
    int panels = 0;
    void size(int rows, int columns) {
        panels = up(columns);
        arena.grow((size_t)up(rows) * panels * AREA * sizeof(T));
    }
    T* block(int row_block, int panel) const { return (T*)arena.data + ((size_t)row_block * panels + panel) * AREA; }
    T* at(int row, int column) const { return block(row / SIDE, column / SIDE) + row % SIDE * SIDE + column % SIDE; }
};

struct Item {  // of attention: the single tokens of `count` segments (in `order`, at `place`), or, if it is 0, tokens [first, first + tokens) of segment `place`
    int place, count, first, tokens, shared;
};

struct State {
    Model m = {};
    const Cache cache;
    Team<Ready> team;
    Plan plan;  // of the pass
    int group = 0;                // query heads of a key-value head, at most
    int ready_width = 0;          // numbers of all heads of a row, at most
    int before = 0, between = 0;  // widths of the results of the first product and of the inputs of the second, at most
    Blocks<float> x, qkv, side;
    Blocks<taken> h, mixed, act, thin;
    Arena rotated;  // [N, ready_width]: heads and then keys and values, dim of each
    std::vector<int> segment, position, order;
    std::vector<Item> items;
    std::vector<char> present;  // [slots][row blocks]: whether an adapter has rows there

    State(const Cache& cache, int threads) : cache(cache), team(threads) {}

    void use(const Model& model) {
        m = model, group = 1, ready_width = before = between = 0;
        for (int i = 0; i < m.layers; i++) {
            const Layer& l = m.layer[i];
            before = std::max({before, l.qkv.n, l.into_recurrence.n}), between = std::max({between, l.out.k, l.out_of_recurrence.k});
            group = std::max(group, m.heads / l.kv_heads), ready_width = std::max(ready_width, (m.heads + 2 * l.kv_heads) * dim_of(l));
        }
    }

    static int dim_of(const Layer& l) { return up(l.head_dim) * SIDE; }  // head size in the cache

    stored* keys(int layer, int block, int head) const {
        const Layer& l = m.layer[layer];
        return cache.data + l.cached * cache.blocks + ((size_t)block * l.kv_heads + head) * 2 * dim_of(l) * SIDE;
    }

    // What the token at a position of the sequence brings to the convolution of a layer.
    stored* input(const Pass& p, int layer, int s, int at) const {
        const int block = p.tables[(size_t)s * p.width + at / SIDE];
        return cache.inputs + (((size_t)m.layer[layer].place * cache.blocks + block) * SIDE + at % SIDE) * up(m.hidden) * SIDE;
    }

    taken* ready(const Layer& l, int row, int head) const { return (taken*)rotated.data + (size_t)row * ready_width + (size_t)head * dim_of(l); }

    void arrange(const Pass& p) {
        int n = p.tokens_count;
        x.size(n, m.hidden), side.size(n, m.hidden), h.size(n, m.hidden), qkv.size(n, before);
        mixed.size(n, between), act.size(n, m.inter);
        rotated.grow((size_t)n * ready_width * sizeof(taken)), segment.resize(n), position.resize(n);
        items.clear(), order.clear();
        for (int s = 0; s < p.segments; s++) {
            int length = p.starts[s + 1] - p.starts[s];
            for (int i = 0; i < length; i++) segment[p.starts[s] + i] = s, position[p.starts[s] + i] = p.context[s] + i;
            if (length == 1) order.push_back(s);
        }
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            const int32_t *ta = p.tables + (size_t)a * p.width, *tb = p.tables + (size_t)b * p.width;
            for (int i = 0; i < p.width; i++)
                if (ta[i] != tb[i]) return ta[i] < tb[i];
            return a < b;
        });
        const int most = std::max(1, ROWS / group);
        for (int i = 0; i < (int)order.size();) {
            Item item = {i, 1, 0, 1, p.context[order[i]] / SIDE};
            for (int j = i + 1; j < (int)order.size() && item.count < most; j++, item.count++) {
                int common = shared(p, order[i], order[j], item.shared);
                if (common < PAIRED) break;
                item.shared = common;
            }
            i += item.count;
            item.shared = item.shared / PAIRED * PAIRED;
            if (item.count == 1) item = {order[item.place], 0, 0, 1, 0};
            items.push_back(item);
        }
        const int some = tokens_of_item(p);
        for (int s = 0; s < p.segments; s++) {
            int length = p.starts[s + 1] - p.starts[s];
            for (int i = 0; length > 1 && i < length; i += some) items.push_back({s, 0, i, std::min(some, length - i), 0});
        }
        arrange_adapters(p);
    }

    // Tokens of a prompt that read keys and values together: TOGETHER rows of queries, or fewer if threads would have nothing to do.
    int tokens_of_item(const Pass& p) const {
        constexpr int EACH = 4;  // jobs for each thread
        const int fair = (int)((size_t)p.tokens_count * (m.heads / group) / ((size_t)EACH * team.size));
        return std::max({1, ROWS / group, std::min(TOGETHER / group, fair)});
    }

    // The number of leading blocks, `most` at most, that two sequences share and that are full.
    int shared(const Pass& p, int a, int b, int most) const {
        most = std::min(most, p.context[b] / SIDE);
        int i = 0;
        while (i < most && p.tables[(size_t)a * p.width + i] == p.tables[(size_t)b * p.width + i]) i++;
        return i;
    }

    void arrange_adapters(const Pass& p) {
        present.assign((size_t)p.slots * up(p.tokens_count), 0);
        for (int row = 0; p.slots && row < p.tokens_count; row++)
            if (int slot = p.adapters[segment[row]]; slot >= 0) present[(size_t)slot * up(p.tokens_count) + row / SIDE] = 1;
        int widest = 0;
        for (int i = 0; i < p.slots * (m.layers + 1) * PLACES; i++) widest = std::max(widest, up(p.low_rank[i].rank));
        if (widest) thin.size(p.tokens_count, p.slots * widest * SIDE);
    }
};
