// Attention over packed trees, backward, and in float32 forward (served.h has that of bf16): a segment's tokens attend to all of
// its ancestors, and causally to their own segment.
//
// Thirty-two rows of queries at a time (the heads that share keys, of neighbouring tokens) against all keys they see: scores are
// whole rows, so the softmax is the plain one and nothing but q, k and v is kept for the backward pass, which computes scores
// again. Keys and values lie in blocks of 32 tokens of one segment. No mask is ever made: the tokens of a block that a row sees
// are a range.
//
// In bf16 queries and keys are passed in float32, with values that bf16 can represent. The intermediate results (the weights of
// the softmax, the gradients of the scores) are float32 too: products take both halves of it, x = high + low. The gradients of a
// row's scores sum to zero; the weight of a token that all attend to is just below one and rounds the same way in every row.
// (Measured on SmolLM2-135M: rounded once, they make the error of the whole gradient several times that of attention in float32.)
#pragma once
#include "rows.h"

struct Trees {
    int32_t tokens, segments, heads, kv_heads, dim, window;  // window 0: none
    float scale;
    const int32_t *start, *length, *parent;  // [segments]; parent -1 is a root, and comes before its children
};

struct Span {  // neighbouring key blocks of one segment
    int block, count, position, valid;  // of the first token; valid: tokens from there to the segment's end
};

struct Rows {  // up to 32 rows of queries: [token, head of the group]
    int segment, first, count;  // counted in rows of the segment
};

struct Layout {
    const Trees& t;
    std::vector<int> base, block, root;  // per segment: position of its first token, its first key block, its tree
    std::vector<std::vector<Rows>> trees;
    int blocks = 0, group;

    explicit Layout(const Trees& t) : t(t), base(t.segments), block(t.segments), root(t.segments), group(t.heads / t.kv_heads) {
        for (int s = 0; s < t.segments; s++) {
            int p = t.parent[s];
            base[s] = p < 0 ? 0 : base[p] + t.length[p];
            root[s] = p < 0 ? (int)trees.size() : root[p];
            block[s] = blocks;
            blocks += up(t.length[s]);
            if (p < 0) trees.emplace_back();
            for (int first = 0; first < t.length[s] * group; first += SIDE)
                trees[root[s]].push_back({s, first, std::min(SIDE, t.length[s] * group - first)});
        }
    }

    // The key blocks that these rows see, root first. Returns their number.
    int spans(const Rows& rows, std::vector<Span>& out) const {
        out.clear();
        int s = rows.segment, low = base[s] + rows.first / group, high = base[s] + (rows.first + rows.count - 1) / group, total = 0;
        for (; s >= 0; s = t.parent[s]) {
            int from = t.window ? std::max(0, low - t.window + 1 - base[s]) / SIDE : 0;
            int to = up(std::min(t.length[s], high - base[s] + 1));
            if (to <= from) continue;
            out.push_back({block[s] + from, to - from, base[s] + from * SIDE, t.length[s] - from * SIDE});
            total += to - from;
        }
        std::reverse(out.begin(), out.end());
        return total;
    }
    int position(const Rows& rows, int r) const { return base[rows.segment] + (rows.first + r) / group; }
    // The offset of row r of key-value head h in [tokens, heads, dim].
    size_t place(const Rows& rows, int h, int r) const {
        int at = rows.first + r;
        return ((size_t)(t.start[rows.segment] + at / group) * t.heads + h * group + at % group) * t.dim;
    }
};

template <class T>
struct Attention {
    const Trees& t;
    const float *q, *k;  // [tokens, heads, dim], [tokens, kv_heads, dim]
    const T* v;          // [tokens, kv_heads, dim]
    Layout layout{t};
    const int panels = up(t.dim), wide = panels * SIDE;
    const size_t one = (size_t)panels * AREA;  // elements of a packed block
    static constexpr bool HALVES = sizeof(T) == 2;  // whether intermediate results have a second half

    static T* arena(size_t count, int which) {
        static thread_local Arena kept[4];
        kept[which].grow(count * sizeof(T));
        return (T*)kept[which].data;
    }

    // Blocks of keys or values of all heads, [kv_heads][blocks][panels][AREA], packed along the tokens or across them, or both.
    template <class S>
    void pack(const S* from, T* across, T* down) const {
        team::each(t.segments * t.kv_heads, [&](int item) {
            int s = item / t.kv_heads, h = item % t.kv_heads;
            alignas(64) T block[AREA];
            for (int b = 0; b < up(t.length[s]); b++)
                for (int p = 0; p < panels; p++) {
                    size_t token = t.start[s] + b * SIDE, place = ((size_t)h * layout.blocks + layout.block[s] + b) * one;
                    cut(from + (token * t.kv_heads + h) * t.dim + p * SIDE, (size_t)t.kv_heads * t.dim, std::min(SIDE, t.length[s] - b * SIDE),
                        std::min(SIDE, t.dim - p * SIDE), block, SIDE);
                    if (down) pack_down(block, SIDE, down + place + (size_t)p * AREA);
                    if (across) pack_across(block, SIDE, across + place + (size_t)p * AREA);
                }
        });
    }

    // Rows of head h.
    template <class S>
    void collect(const S* from, const Rows& rows, int h, T* to) const {
        float* exact = team::room<float>(wide, 8);
        for (int r = 0; r < SIDE; r++) {
            for (int i = 0; i < wide; i++) exact[i] = 0;
            if (r < rows.count) expand(from + layout.place(rows, h, r), t.dim, exact);
            for (int i = 0; i < wide; i += 16) write(to + (size_t)r * wide + i, load(exact + i));
        }
    }
    template <class S>
    void scatter(const float* from, const Rows& rows, int h, int panel, S* to) const {
        for (int r = 0; r < rows.count; r++)
            shrink(from + r * SIDE, std::min(SIDE, t.dim - panel * SIDE), to + layout.place(rows, h, r) + panel * SIDE);
    }

    // s [32, columns] = rows [32, wide] times the keys (or values) of all spans.
    void against(const T* rows, const T* across, const std::vector<Span>& spans, float* s, size_t ld) const {
        for (const Span& span : spans)
            for (int b = span.block; b < span.block + span.count; b++, s += SIDE)
                multiply<false>(rows, wide, across + b * one, AREA, panels, s, ld);
    }
    // c [32, 32] = weights [32, columns] times one panel of the values (or keys) of all spans; added to c unless `first`.
    void along(const T* weights, size_t ld, const T* down, const std::vector<Span>& spans, int panel, float* c, bool first = true) const {
        for (const Span& span : spans) {
            const T* b = down + span.block * one + (size_t)panel * AREA;
            if (first) multiply<false>(weights, ld, b, one, span.count, c, SIDE);
            else multiply<true>(weights, ld, b, one, span.count, c, SIDE);
            first = false, weights += span.count * SIDE;
        }
    }

    // exp(scaled score - largest) for the tokens that a row at `position` sees, zero elsewhere. Returns the sum.
    float exponentials(float* s, const std::vector<Span>& spans, int position) const {
        const float by = t.scale * 1.44269504f;
        f16x high = splat(-INFINITY), total = {};
        auto ranges = [&](auto&& f) {
            float* at = s;
            for (const Span& span : spans) {
                int from = t.window ? position - t.window + 1 - span.position : 0, to = std::min(span.valid, position - span.position + 1);
                for (int c = 0; c < span.count * SIDE; c += 16, at += 16) f(at, c, from, to);
            }
        };
        ranges([&](float* at, int c, int from, int to) {
            f16x x = load(at) * by;
            if (c < from || c + 16 > to) x = within(x, c, from, to);
            store(at, x);
            high = max16(x, high);
        });
        float top = largest(high);
        ranges([&](float* at, int, int, int) {
            f16x e = exp2_16(load(at) - top);
            store(at, e);
            total += e;
        });
        return sum(total);
    }

    // The number of parts that one tree and head is split into: enough to occupy the threads, and independent of their number.
    int chunks() const { return std::max(1, 16 / (int)(layout.trees.size() * t.kv_heads)); }

    void backward(const T* d_out, float* dq, float* dk, T* dv) const {
        size_t count = layout.blocks * t.kv_heads * one;
        T *keys = arena(count, 0), *values = arena(count, 1), *keys_down = arena(count, 2);
        pack(k, keys, keys_down);
        pack(v, values, nullptr);
        static thread_local Arena sums;
        int shares = chunks();
        sums.grow(shares * count * 2 * sizeof(float));
        float* summed = (float*)sums.data;
        team::each((int)layout.trees.size() * t.kv_heads * shares, [&](int item) {
            int share = item % shares, h = item / shares % t.kv_heads, tree = item / shares / t.kv_heads;
            float* mine = summed + ((size_t)share * t.kv_heads + h) * layout.blocks * one * 2;
            size_t head = (size_t)h * layout.blocks * one;
            for (int s = 0; s < t.segments; s++)
                if (layout.root[s] == tree) std::memset(mine + layout.block[s] * one * 2, 0, up(t.length[s]) * one * 2 * sizeof(float));
            for (size_t i = share; i < layout.trees[tree].size(); i += shares)
                rows_backward(layout.trees[tree][i], h, d_out, keys + head, keys_down + head, values + head, dq, mine);
        });
        team::each(t.segments * t.kv_heads, [&](int item) { add_up(item / t.kv_heads, item % t.kv_heads, summed, shares, dk, dv); });
    }

   private:
    void rows_backward(const Rows& rows, int h, const T* d_out, const T* keys, const T* keys_down, const T* values, float* dq, float* sums) const {
        std::vector<Span> spans;
        size_t ld = (size_t)layout.spans(rows, spans) * SIDE;
        T *mine = team::room<T>(SIDE * wide, 0), *d_mine = team::room<T>(SIDE * wide, 1), *p = team::room<T>(SIDE * ld * 2, 2), *p_left = p + SIDE * ld, *ds = team::room<T>(SIDE * ld * 2, 3);
        T *ds_left = ds + SIDE * ld, *mine_down = team::room<T>(one, 6), *d_mine_down = team::room<T>(one, 7);
        float *s = team::room<float>(SIDE * ld, 4), *dp = team::room<float>(SIDE * ld, 5);
        alignas(64) float c[AREA];
        collect(q, rows, h, mine);
        collect(d_out, rows, h, d_mine);
        against(mine, keys, spans, s, ld);
        against(d_mine, values, spans, dp, ld);
        for (int r = 0; r < SIDE; r++) scores_backward(s + r * ld, dp + r * ld, spans, r < rows.count ? layout.position(rows, r) : -1, ld, p + r * ld, p_left + r * ld, ds + r * ld, ds_left + r * ld);
        for (int panel = 0; panel < panels; panel++) {
            along(ds, ld, keys_down, spans, panel, c);
            if (HALVES) along(ds_left, ld, keys_down, spans, panel, c, false);
            scatter(c, rows, h, panel, dq);
            pack_down(mine + panel * SIDE, wide, mine_down + panel * AREA);
            pack_down(d_mine + panel * SIDE, wide, d_mine_down + panel * AREA);
        }
        alignas(64) T turned[AREA], turned_left[AREA];
        size_t column = 0;
        for (const Span& span : spans)
            for (int b = span.block; b < span.block + span.count; b++, column += SIDE) {
                float* to = sums + (size_t)b * one * 2;  // [dk | dv][32 tokens, wide]
                turn(ds + column, ld, turned, SIDE);
                if (HALVES) turn(ds_left + column, ld, turned_left, SIDE);
                for (int panel = 0; panel < panels; panel++) {
                    multiply<true>(turned, SIDE, mine_down + panel * AREA, AREA, 1, to + panel * SIDE, wide);
                    if (HALVES) multiply<true>(turned_left, SIDE, mine_down + panel * AREA, AREA, 1, to + panel * SIDE, wide);
                }
                turn(p + column, ld, turned, SIDE);
                if (HALVES) turn(p_left + column, ld, turned_left, SIDE);
                for (int panel = 0; panel < panels; panel++) {
                    multiply<true>(turned, SIDE, d_mine_down + panel * AREA, AREA, 1, to + one + panel * SIDE, wide);
                    if (HALVES) multiply<true>(turned_left, SIDE, d_mine_down + panel * AREA, AREA, 1, to + one + panel * SIDE, wide);
                }
            }
    }

    // The weights p of one row and the gradient of its scores, d_s = p (d_p - sum(p d_p)) times the scale.
    void scores_backward(float* s, const float* dp, const std::vector<Span>& spans, int position, size_t n, T* p, T* p_left, T* ds, T* ds_left) const {
        if (position < 0) {
            for (T* row : {p, p_left, ds, ds_left}) std::memset(row, 0, n * sizeof(T));
            return;
        }
        float by = 1.f / exponentials(s, spans, position);
        f16x total = {};
        for (size_t i = 0; i < n; i += 16) total += load(s + i) * load(dp + i);
        float mean = sum(total) * by;
        for (size_t i = 0; i < n; i += 16) {
            f16x weight = load(s + i) * by;
            write(p + i, weight);
            write(p_left + i, weight - read(p + i));
            f16x slope = weight * (load(dp + i) - mean) * t.scale;
            write(ds + i, slope);
            write(ds_left + i, slope - read(ds + i));
        }
    }

    void add_up(int segment, int h, const float* sums, int shares, float* dk, T* dv) const {
        size_t apart = (size_t)t.kv_heads * layout.blocks * one * 2;
        float* row = team::room<float>(wide);
        for (int i = 0; i < t.length[segment]; i++)
            for (int which = 0; which < 2; which++) {
                const float* from = sums + ((size_t)h * layout.blocks + layout.block[segment] + i / SIDE) * one * 2 + which * one + (size_t)(i % SIDE) * wide;
                for (int c = 0; c < wide; c += 16) {
                    f16x total = load(from + c);
                    for (int share = 1; share < shares; share++) total += load(from + share * apart + c);
                    store(row + c, total);
                }
                size_t to = ((size_t)(t.start[segment] + i) * t.kv_heads + h) * t.dim;
                if (which) shrink(row, t.dim, dv + to);
                else shrink(row, t.dim, dk + to);
            }
    }
};
