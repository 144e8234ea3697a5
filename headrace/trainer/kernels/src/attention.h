// Attention over packed trees, backward (served.h has the forward pass): a segment's tokens attend to all of its ancestors, and causally
// to their own segment.
//
// Some rows of queries at a time (the heads that share keys, of neighbouring tokens) go over the keys they see, which lie in blocks of 32
// tokens of one segment. Scores are computed again. No mask is ever made: the tokens of a block that a row sees are a range.
//
// In float32 the forward pass left each row's largest score, its sum and its result. From these a block's weights and their gradients
// follow without the other blocks, so scores stay in the cache: 128 rows by four blocks.
//
// In bf16 queries and keys are passed in float32, with values that bf16 can represent. The intermediate results (the weights of
// the softmax, the gradients of the scores) are float32 too: products take both halves of it, x = high + low. The gradients of a
// row's scores sum to zero; the weight of a token that all attend to is just below one and rounds the same way in every row.
// (Measured on SmolLM2-135M: rounded once, they make the error of the whole gradient several times that of attention in float32.)
// The forward pass rounded its weights, so its result cannot stand for that sum: scores are whole rows, 32 at a time.
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

struct Rows {  // rows of queries: [token, head of the group]
    int segment, first, count;  // counted in rows of the segment
};

struct Layout {
    const Trees& t;
    std::vector<int> base, block, root;  // per segment: position of its first token, its first key block, its tree
    std::vector<std::vector<Rows>> trees;
    int blocks = 0, group;

    Layout(const Trees& t, int most) : t(t), base(t.segments), block(t.segments), root(t.segments), group(t.heads / t.kv_heads) {
        for (int s = 0; s < t.segments; s++) {
            int p = t.parent[s];
            base[s] = p < 0 ? 0 : base[p] + t.length[p];
            root[s] = p < 0 ? (int)trees.size() : root[p];
            block[s] = blocks;
            blocks += up(t.length[s]);
            if (p < 0) trees.emplace_back();
            for (int first = 0; first < t.length[s] * group; first += most)
                trees[root[s]].push_back({s, first, std::min(most, t.length[s] * group - first)});
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
    const T* out;        // [tokens, heads, dim]: the result of the forward pass, and
    const float* left;   // [tokens, heads, 2]: each row's largest score and sum there; both in float32 alone
    static constexpr bool HALVES = sizeof(T) == 2;  // whether intermediate results have a second half
    static constexpr int HIGH = HALVES ? SIDE : 128, LONG = 4;  // rows of queries, and blocks of keys, at a time
    Layout layout{t, HIGH};
    const int panels = up(t.dim), wide = panels * SIDE;
    const size_t one = (size_t)panels * AREA;  // elements of a packed block

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

    // The number of parts that one tree and head is split into: enough to occupy the threads, and independent of their number.
    int chunks() const { return std::max(1, 16 / (int)(layout.trees.size() * t.kv_heads)); }

    void backward(const T* d_out, float* dq, float* dk, T* dv) const {
        size_t count = layout.blocks * t.kv_heads * one;
        T *keys = arena(count, 0), *values = arena(count, 1), *keys_down = arena(count, 2);
        pack(k, keys, keys_down);
        pack(v, values, nullptr);
        static thread_local Arena room;
        int shares = chunks();
        room.grow(shares * count * 2 * sizeof(float));
        float* summed = (float*)room.data;
        team::each((int)layout.trees.size() * t.kv_heads * shares, [&](int item) {
            int share = item % shares, h = item / shares % t.kv_heads, tree = item / shares / t.kv_heads;
            float* mine = summed + ((size_t)share * t.kv_heads + h) * layout.blocks * one * 2;
            size_t head = (size_t)h * layout.blocks * one;
            for (int s = 0; s < t.segments; s++)
                if (layout.root[s] == tree) std::memset(mine + layout.block[s] * one * 2, 0, up(t.length[s]) * one * 2 * sizeof(float));
            for (size_t i = share; i < layout.trees[tree].size(); i += shares)
                rows_backward(layout.trees[tree][i], h, d_out, {keys + head, keys_down + head, values + head}, dq, mine);
        });
        team::each(t.segments * t.kv_heads, [&](int item) { add_up(item / t.kv_heads, item % t.kv_heads, summed, shares, dk, dv); });
    }

   private:
    struct Packed {  // blocks of one head
        const T *keys, *keys_down, *values;
    };
    // Rows of queries, or of the gradient of their results: [high, wide], and packed along the rows, [panels][high][SIDE].
    struct Operand {
        T *rows, *down;
    };
    // What is computed for some rows and blocks, [blocks][high][SIDE]. In float32 weights take the place of scores, and the scores' gradients
    // that of the weights' gradients.
    struct Scores {
        float *s, *dp;
        T *p, *ds, *p_left, *ds_left;
    };

    void rows_backward(const Rows& rows, int h, const T* d_out, const Packed& packed, float* dq, float* of_keys) const {
        std::vector<Span> spans;
        const int seen = layout.spans(rows, spans), high = up(rows.count) * SIDE;
        const size_t block = (size_t)high * SIDE, several = (HALVES ? seen : LONG) * block;
        const Operand mine = collect(q, rows, h, high, 0), d_mine = collect(d_out, rows, h, high, 2);
        Scores all = {team::room<float>(several, 4), team::room<float>(several, 5)};
        float *sum = team::room<float>((size_t)high * wide, 6), by[HIGH], mean[HIGH], peak[HIGH];
        std::memset(sum, 0, (size_t)high * wide * sizeof(float));
        if constexpr (HALVES) {
            T* halves = team::room<T>(4 * LONG * block, 7);
            all.p = halves, all.ds = halves + LONG * block, all.p_left = halves + 2 * LONG * block, all.ds_left = halves + 3 * LONG * block;
            float *s = all.s, *dp = all.dp;
            for (const Span& span : spans) against(mine, d_mine, packed, span, rows.count, block, s, dp), s += span.count * block, dp += span.count * block;
            for (int r = 0; r < rows.count; r++) softmax(all, spans, r, layout.position(rows, r), block, by[r], mean[r]);
        } else {
            all.p = all.s, all.ds = all.dp;
            for (int r = 0; r < rows.count; r++) {
                const size_t at = layout.place(rows, h, r), row = at / t.dim;
                peak[r] = left[2 * row], by[r] = 1.f / left[2 * row + 1], mean[r] = inner(out + at, d_out + at);
            }
        }
        for (const Span& span : spans)
            for (int first = 0; first < span.count; first += LONG) {
                const Span some = {span.block + first, std::min(LONG, span.count - first), span.position + first * SIDE, span.valid - first * SIDE};
                if constexpr (HALVES) {
                    halve(all, some.count, rows.count, block, by, mean);
                    if (rows.count < SIDE) blank(all, some.count, rows.count, block);
                } else {
                    against(mine, d_mine, packed, some, rows.count, block, all.s, all.dp);
                    for (int r = 0; r < rows.count; r++) weigh(all, some, r, layout.position(rows, r), block, peak[r], by[r], mean[r]);
                }
                into_queries(all, packed, some, rows.count, block, sum);
                for (int b = 0; b < some.count; b++) into_keys(all, mine, d_mine, b * block, rows.count, of_keys + (size_t)(some.block + b) * one * 2);
                if (HALVES) all.s += some.count * block, all.dp += some.count * block;
            }
        for (int r = 0; r < rows.count; r++) shrink(sum + r * wide, t.dim, dq + layout.place(rows, h, r));
    }

    // Rows of head h.
    template <class S>
    Operand collect(const S* from, const Rows& rows, int h, int high, int which) const {
        float* exact = team::room<float>(wide, 8);
        const Operand to = {team::room<T>((size_t)high * wide, which), team::room<T>((size_t)high * wide, which + 1)};
        for (int r = 0; r < high; r++) {
            for (int i = 0; i < wide; i++) exact[i] = 0;
            if (r < rows.count) expand(from + layout.place(rows, h, r), t.dim, exact);
            for (int i = 0; i < wide; i += 16) write(to.rows + (size_t)r * wide + i, load(exact + i));
        }
        for (int panel = 0; panel < panels; panel++)
            for (int r = 0; r < high; r += SIDE) pack_down(to.rows + (size_t)r * wide + panel * SIDE, wide, to.down + ((size_t)panel * high + r) * SIDE);
        return to;
    }

    // Scores, and the gradients of their weights: rows times keys and values.
    void against(const Operand& mine, const Operand& d_mine, const Packed& packed, const Span& span, int count, size_t block, float* s, float* dp) const {
        for (int b = span.block; b < span.block + span.count; b++, s += block, dp += block)
            for (int r = 0; r < count; r += SIDE) {
                const int some = std::min(SIDE, count - r);
                multiply<false>(Inputs<T>{mine.rows + (size_t)r * wide, (size_t)wide, SIDE}, Panel<T>{packed.keys + b * one}, panels, s + r * SIDE, SIDE, some);
                multiply<false>(Inputs<T>{d_mine.rows + (size_t)r * wide, (size_t)wide, SIDE}, Panel<T>{packed.values + b * one}, panels, dp + r * SIDE, SIDE, some);
            }
    }

    // Rounded as a product's sums are, so that the gradient of a row that sees itself alone is zero.
    float inner(const T* a, const T* b) const {
        float total = 0;
        for (int c = 0; c < t.dim; c++) {
#if defined(__FMA__) || defined(__aarch64__)
            total = __builtin_fmaf(read1(a + c), read1(b + c), total);
#else
            total += read1(a + c) * read1(b + c);
#endif
        }
        return total;
    }

    // f(sixteen scores of a row, their column, and the range of columns of the span that the row sees).
    template <class F>
    void ranges(float* row, const Span& span, int position, size_t block, const F& f) const {
        const int from = t.window ? position - t.window + 1 - span.position : 0, to = std::min(span.valid, position - span.position + 1);
        for (int b = 0; b < span.count; b++, row += block)
            for (int c = 0; c < SIDE; c += 16) f(row + c, b * SIDE + c, from, to);
    }

    // Row r of some blocks, in float32: its weights p, and the gradient of its scores, p (dp - sum(p dp)) times the scale. `mean` is that sum.
    void weigh(const Scores& all, const Span& some, int r, int position, size_t block, float peak, float by, float mean) const {
        const float scale = t.scale * 1.44269504f;
        const ptrdiff_t apart = all.dp - all.s;
        ranges(all.s + r * SIDE, some, position, block, [&](float* at, int c, int from, int to) {
            f16x x = difference(load(at), scale, peak);
            if (c < from || c + 16 > to) x = within(x, c, from, to);
            const f16x weight = exp2_16(x) * by;
            store(at, weight);
            store(at + apart, weight * (load(at + apart) - mean) * t.scale);
        });
    }

    // Whole rows in bf16: row r of `s` becomes exp(scaled score - largest), zero where the row does not see. `by`: one over their sum.
    void softmax(const Scores& all, const std::vector<Span>& spans, int r, int position, size_t block, float& by, float& mean) const {
        const float scale = t.scale * 1.44269504f;
        f16x high = splat(-INFINITY), total = {}, along = {};
        const auto each = [&](const auto& f) {
            float* row = all.s + r * SIDE;
            for (const Span& span : spans) ranges(row, span, position, block, f), row += span.count * block;
        };
        each([&](float* at, int c, int from, int to) {
            f16x x = load(at) * scale;
            if (c < from || c + 16 > to) x = within(x, c, from, to);
            store(at, x);
            high = max16(x, high);
        });
        const float top = largest(high);
        const ptrdiff_t apart = all.dp - all.s;
        each([&](float* at, int, int, int) {
            const f16x e = exp2_16(load(at) - top);
            store(at, e);
            total += e;
            along += e * load(at + apart);
        });
        by = 1.f / sum(total), mean = sum(along) * by;
    }

    // Some blocks of these, in halves of bf16.
    void halve(const Scores& all, int blocks, int count, size_t block, const float* by, const float* mean) const {
        for (int b = 0; b < blocks; b++)
            for (int r = 0; r < count; r++)
                for (size_t c = 0, i = b * block + r * SIDE; c < SIDE; c += 16, i += 16) {
                    const f16x weight = load(all.s + i) * by[r], slope = weight * (load(all.dp + i) - mean[r]) * t.scale;
                    write(all.p + i, weight);
                    write(all.p_left + i, weight - read(all.p + i));
                    write(all.ds + i, slope);
                    write(all.ds_left + i, slope - read(all.ds + i));
                }
    }
    // Rows from `count` on are zero: sums over rows go over whole blocks.
    void blank(const Scores& all, int blocks, int count, size_t block) const {
        for (int b = 0; b < blocks; b++)
            for (T* half : {all.p, all.p_left, all.ds, all.ds_left}) std::memset(half + b * block + count * SIDE, 0, (block - count * SIDE) * sizeof(T));
    }

    // sum [high, wide] += gradients of the scores times keys.
    void into_queries(const Scores& all, const Packed& packed, const Span& some, int count, size_t block, float* sum) const {
        for (const T* ds : {all.ds, HALVES ? all.ds_left : nullptr})
            for (int r = 0; ds && r < count; r += SIDE)
                for (int panel = 0; panel < panels; panel++)
                    multiply<true>(Inputs<T>{ds + r * SIDE, SIDE, block}, Panel<T>{packed.keys_down + some.block * one + (size_t)panel * AREA, one}, some.count,
                                   sum + (size_t)r * wide + panel * SIDE, wide, std::min(SIDE, count - r));
    }

    // to [dk | dv][32 tokens, wide] += the transpose of a block of gradients of scores times queries, and of weights times d_out.
    void into_keys(const Scores& all, const Operand& mine, const Operand& d_mine, size_t at, int count, float* to) const {
        const auto high = [&](int panel) { return (size_t)panel * up(count) * AREA; };
        for (int panel = 0; panel < panels; panel++) {
            if constexpr (!HALVES) {
                multiply_turned(all.ds + at, mine.down + high(panel), count, to + panel * SIDE, wide);
                multiply_turned(all.p + at, d_mine.down + high(panel), count, to + one + panel * SIDE, wide);
            } else {
                alignas(64) T turned[AREA];
                for (const T* half : {all.ds, all.ds_left}) turn(half + at, SIDE, turned, SIDE), multiply<true>(turned, SIDE, mine.down + high(panel), AREA, 1, to + panel * SIDE, wide);
                for (const T* half : {all.p, all.p_left}) turn(half + at, SIDE, turned, SIDE), multiply<true>(turned, SIDE, d_mine.down + high(panel), AREA, 1, to + one + panel * SIDE, wide);
            }
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
