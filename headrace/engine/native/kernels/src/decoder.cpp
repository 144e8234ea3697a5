// One forward pass of a Llama-like decoder as one job of a team of threads.
//
//   embed | norm  qkv  rotate+store  attend  out(+=)  norm  gate_up*act  down(+=) | ... | norm  head
//
// Each word is a phase: its items are shared out among the threads, and a barrier stands behind it. The residual stream is
// float32 and lies in the blocks of gemm.h, so `out` and `down` add to it where they store their tiles.
#include "decoder.h"

#include <vector>

#include "pool.h"
#include "sampling.h"

namespace {

template <class T>
struct Blocks {  // [rows / 32][panels][32][32]; grows, and is zero where nothing was written
    Arena arena;
    int panels = 0;
    void size(int rows, int columns) {
        panels = up(columns);
        arena.grow((size_t)up(rows) * panels * AREA * sizeof(T));
    }
    T* block(int row_block, int panel) const { return (T*)arena.data + ((size_t)row_block * panels + panel) * AREA; }
    T* at(int row, int column) const { return block(row / SIDE, column / SIDE) + row % SIDE * SIDE + column % SIDE; }
};

struct Item {  // of attention: the single tokens of `count` segments (in `order`), or tokens [first, first + tokens) of one segment
    int place, count, first, tokens, shared;
};

struct Decoder {
    Model m = {};
    const Cache cache;
    Team team;
    int dim = 0, group = 0;  // head size in the cache; query heads of a key-value head
    Blocks<float> x, qkv, side;
    Blocks<bf16> h, mixed, act, thin;
    Arena rotated;  // [N, heads and then keys and values, dim]
    std::vector<int> segment, position, order;
    std::vector<Item> items;
    std::vector<char> present;  // [slots][row blocks]: whether an adapter has rows there

    Decoder(const Cache& cache, int threads) : cache(cache), team(threads) {}

    void use(const Model& model) { m = model, dim = up(m.head_dim) * SIDE, group = m.heads / m.kv_heads; }

    bf16* keys(int layer, int block, int head) const {
        return cache.data + (((size_t)layer * cache.blocks + block) * m.kv_heads + head) * 2 * dim * SIDE;
    }

    bf16* ready(int row, int head) const { return (bf16*)rotated.data + ((size_t)row * (m.heads + 2 * m.kv_heads) + head) * dim; }

    void forward(const Pass& p) {
        arrange(p);
        team.run([&] {
            NoDenormals flushed;
            tiles_begin();
            embed(p);
            for (int i = 0; i < m.layers; i++) layer(p, i, m.layer[i]);
            head(p);
            tiles_end();
        });
    }

    // -- before the job: who attends with whom --------------------------------------------------------------------------------

    void arrange(const Pass& p) {
        int n = p.tokens_count;
        x.size(n, m.hidden), side.size(n, m.hidden), h.size(n, m.hidden), qkv.size(n, (m.heads + 2 * m.kv_heads) * m.head_dim);
        mixed.size(n, m.heads * m.head_dim), act.size(n, m.inter);
        rotated.grow((size_t)n * (m.heads + 2 * m.kv_heads) * dim * sizeof(bf16)), segment.resize(n), position.resize(n);
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
        int most = std::max(1, ROWS / group);
        for (int i = 0; i < (int)order.size();) {
            Item item = {i, 1, 0, 1, p.context[order[i]] / SIDE};
            for (int j = i + 1; j < (int)order.size() && item.count < most; j++, item.count++) {
                int common = shared(p, order[i], order[j], item.shared);
                if (!common) break;
                item.shared = common;
            }
            if (item.count == 1) item.shared = 0;
            items.push_back(item), i += item.count;
        }
        for (int s = 0; s < p.segments; s++) {
            int length = p.starts[s + 1] - p.starts[s];
            for (int i = 0; length > 1 && i < length; i += most) items.push_back({s, 0, i, std::min(most, length - i), 0});
        }
        arrange_adapters(p);
    }

    // Leading blocks of two sequences that are the same and full, `most` at most.
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
        for (int i = 0; i < p.slots * m.layers * 4; i++) widest = std::max(widest, up(p.low_rank[i].rank));
        if (widest) thin.size(p.tokens_count, p.slots * widest * SIDE);
    }

    // -- phases ---------------------------------------------------------------------------------------------------------------

    void embed(const Pass& p) {
        team.each(p.tokens_count, [&](int row) {
            const bf16* from = m.embed + p.tokens[row] * m.hidden;
            p.broken[row] = -1;
            for (int c = 0; c < up(m.hidden) * SIDE; c++) *x.at(row, c) = c < m.hidden ? widen1(from[c]) * m.embed_scale : 0;
        });
    }

    void layer(const Pass& p, int index, const Layer& l) {
        int n = p.tokens_count;
        normalise(n, l.input_norm, nullptr, p.broken, index - 1);
        product<false>(p, index, 0, l.qkv, h, qkv);
        rotate(p, index, l);
        attend(p, index, l);
        add(p, index, 1, l.out, mixed, l.after_attention);
        normalise(n, l.mlp_norm, nullptr, p.broken, index);
        gate(p, index, l.gate_up);
        add(p, index, 3, l.down, act, l.after_mlp);
    }

    // x += w(from), through a norm of its own where there is one.
    void add(const Pass& p, int index, int which, const Linear& w, Blocks<bf16>& from, const float* norm) {
        if (!norm) return product<true>(p, index, which, w, from, x);
        product<false>(p, index, which, w, from, side);
        team.each(p.tokens_count, [&](int row) {
            float by = inverse_rms(side, row);
            for (int c = 0; c < m.hidden; c += 16)
                store(x.at(row, c), load(x.at(row, c)) + load(side.at(row, c)) * by * load(norm + c));
        });
    }

    float inverse_rms(Blocks<float>& from, int row) {
        f16x squares = {};
        for (int c = 0; c < up(m.hidden) * SIDE; c += 16) squares += load(from.at(row, c)) * load(from.at(row, c));
        return 1.f / std::sqrt(sum(squares) / m.hidden + m.eps);
    }

    // h = RMSNorm(x) of all rows, or of the chosen ones. Notes the rows that are not finite: the layer before is to blame.
    void normalise(int count, const float* weight, const int64_t* chosen, int32_t* broken, int before) {
        constexpr int EACH = 8;
        team.each((count + EACH - 1) / EACH, [&](int item) {
            for (int to = item * EACH; to < std::min(count, (item + 1) * EACH); to++) {
                int row = chosen ? chosen[to] : to;
                float by = inverse_rms(x, row);
                if (!(by > 0) && broken[row] < 0) broken[row] = std::max(before, 0);
                for (int c = 0; c < up(m.hidden) * SIDE; c += 16) narrow(h.at(to, c), load(x.at(row, c)) * by * load(weight + c));
            }
        });
    }

    template <bool ADD>
    void product(const Pass& p, int index, int which, const Linear& w, Blocks<bf16>& from, Blocks<float>& into) {
        int n = p.tokens_count, steps = up(w.k);
        shrink(p, index, which, from);
        team.each(up(w.n), [&](int panel) {
            for (int b = 0; b < up(n); b++) {
                float* c = into.block(b, panel);
                multiply<ADD>(from.block(b, 0), w.packed + (size_t)panel * steps * AREA, steps, c, SIDE, n - b * SIDE <= 16);
                finish(p, index, which, w, panel, b, c);
            }
        });
    }

    // What stands beside the product: bias and adapters.
    void finish(const Pass& p, int index, int which, const Linear& w, int panel, int b, float* c) {
        bool half = p.tokens_count - b * SIDE <= 16;
        for (int r = 0; w.bias && r < SIDE; r++)
            for (int j = 0; j < SIDE; j += 16) store(c + r * SIDE + j, load(c + r * SIDE + j) + load(w.bias + panel * SIDE + j));
        for (int slot = 0; slot < p.slots; slot++) {
            const LowRank& l = p.low_rank[((size_t)slot * m.layers + index) * 4 + which];
            if (!l.a || !present[(size_t)slot * up(p.tokens_count) + b]) continue;
            multiply<true>(thin.block(b, slot * (thin.panels / p.slots)), l.b + (size_t)panel * up(l.rank) * AREA, up(l.rank), c, SIDE, half);
        }
    }

    // thin = A x for the rows of each adapter, zero for the others.
    void shrink(const Pass& p, int index, int which, Blocks<bf16>& from) {
        if (!p.slots) return;
        int blocks = up(p.tokens_count), steps = up(which == 0 || which == 2 ? m.hidden : which == 1 ? m.heads * m.head_dim : m.layer[index].down.k);
        team.each(p.slots * blocks, [&](int item) {
            int slot = item / blocks, b = item % blocks;
            const LowRank& l = p.low_rank[((size_t)slot * m.layers + index) * 4 + which];
            if (!l.a || !present[item]) return;
            alignas(64) float c[AREA];
            for (int panel = 0; panel < up(l.rank); panel++) {
                multiply<false>(from.block(b, 0), l.a + (size_t)panel * steps * AREA, steps, c, SIDE, false);
                for (int r = 0; r < SIDE; r++) {
                    int row = b * SIDE + r;
                    bool mine = row < p.tokens_count && p.adapters[segment[row]] == slot;
                    bf16* to = thin.block(b, slot * (thin.panels / p.slots) + panel) + r * SIDE;
                    for (int j = 0; j < SIDE; j += 16) narrow(to + j, mine ? load(c + r * SIDE + j) : f16x{});
                }
            }
        });
    }

    // act(gate) * up, rounded to bf16: sixteen of each lie in one panel.
    void gate(const Pass& p, int index, const Linear& w) {
        int n = p.tokens_count, steps = up(w.k);
        shrink(p, index, 2, h);
        team.each(up(w.n), [&](int panel) {
            alignas(64) float c[AREA];
            for (int b = 0; b < up(n); b++) {
                multiply<false>(h.block(b, 0), w.packed + (size_t)panel * steps * AREA, steps, c, SIDE, n - b * SIDE <= 16);
                finish(p, index, 2, w, panel, b, c);
                bf16* to = act.block(b, panel / 2) + panel % 2 * 16;
                for (int r = 0; r < std::min(SIDE, n - b * SIDE); r++)
                    narrow(to + r * SIDE, activate(load(c + r * SIDE)) * load(c + r * SIDE + 16));
            }
        });
    }

    f16x activate(f16x g) const {
        // SiLU: g sigmoid(g). GELU's tanh form (Hendrycks & Gimpel, arXiv:1606.08415) is g sigmoid(2u) with the same u.
        f16x u = m.gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
        return g * inverse(1.f + exp16(u < -80.f ? splat(80.f) : -u));
    }

    // Rotary embedding (and norms of queries and keys) of every head. Keys and values of longer segments go into the cache, for
    // the whole segment looks at them; that of a single token is stored by who attends for it, next to reading the block.
    void rotate(const Pass& p, int index, const Layer& l) {
        team.each(p.tokens_count, [&](int row) {
            const int d = m.head_dim, half = d / 2, s = segment[row];
            const bool chunk = p.starts[s + 1] - p.starts[s] > 1;
            const float *cos = m.cos[l.rotary] + (size_t)position[row] * half, *sin = m.sin[l.rotary] + (size_t)position[row] * half;
            if (chunk) await(p, index, row);
            alignas(64) float in[512], out[512];
            for (int head = 0; head < m.heads + 2 * m.kv_heads; head++) {
                for (int c = 0; c < d; c += 16) store(in + c, load(qkv.at(row, head * d + c)));
                const float* from = in;
                if (head < m.heads + m.kv_heads) {
                    if (const float* weight = head < m.heads ? l.q_norm : l.k_norm) normalise_head(in, weight);
                    for (int c = 0; c < half; c++) {
                        out[c] = in[c] * cos[c] - in[c + half] * sin[c];
                        out[c + half] = in[c + half] * cos[c] + in[c] * sin[c];
                    }
                    from = out;
                }
                for (int c = 0; c < d; c += 16) narrow(ready(row, head) + c, load(from + c));
            }
            for (int head = 0; chunk && head < m.kv_heads; head++) remember(p, index, row, head);
        });
    }

    bf16* last_block(const Pass& p, int index, int row, int head) const {
        return keys(index, p.tables[(size_t)segment[row] * p.width + position[row] / SIDE], head);
    }

    void remember(const Pass& p, int index, int row, int head) const {
        const int slot = position[row] % SIDE;
        bf16* block = last_block(p, index, row, head);
        const bf16 *key = ready(row, m.heads + head), *value = ready(row, m.heads + m.kv_heads + head);
        for (int c = 0; c < m.head_dim; c += 2) std::memcpy(block + c * SIDE + slot * 2, key + c, 4);
        bf16* to = block + dim * SIDE + slot / 2 * dim * 2 + slot % 2;
        for (int c = 0; c < m.head_dim; c++) to[c * 2] = value[c];
    }

    // The lines that a token's key and value go to lie far apart; while queries are rotated they come.
    void await(const Pass& p, int index, int row) const {
        const int slot = position[row] % SIDE;
        for (int head = 0; head < m.kv_heads; head++) {
            const bf16* block = last_block(p, index, row, head);
            for (int pair = 0; pair < dim / 2; pair++) __builtin_prefetch(block + (pair * SIDE + slot) * 2, 1);
            for (int d = 0; d < dim; d += 16) __builtin_prefetch(block + dim * SIDE + (slot / 2 * dim + d) * 2, 1);
        }
    }

    void normalise_head(float* in, const float* weight) const {
        f16x squares = {};
        for (int c = 0; c < m.head_dim; c += 16) squares += load(in + c) * load(in + c);
        float by = 1.f / std::sqrt(sum(squares) / m.head_dim + m.eps);
        for (int c = 0; c < m.head_dim; c += 16) store(in + c, load(in + c) * by * load(weight + c));
    }

    // An item and several heads at once: their keys and values lie behind one another, and memory likes long reads. With few
    // items every head is a job of its own.
    void attend(const Pass& p, int index, const Layer& l) {
        const int jobs = (int)items.size() < 4 * team.size ? m.kv_heads : 1, heads = m.kv_heads / jobs;
        team.each(items.size() * jobs, [&](int i) {
            thread_local Arena room;
            const int tiles = (group + ROWS - 1) / ROWS;
            room.grow((size_t)2 * heads * tiles * (sizeof(Queries) + ROWS * dim * 6));
            const Item& item = items[i / jobs];
            Rows rows = {(Queries*)room.data, heads * tiles, i % jobs * heads, tiles};
            char* behind = room.data + sizeof(Queries) * 2 * rows.count;
            for (int t = 0; t < 2 * rows.count; t++, behind += ROWS * dim * 6) {
                rows.first[t].dim = dim, rows.first[t].out = (float*)behind, rows.first[t].q = (bf16*)(behind + ROWS * dim * 4);
            }
            if (item.count) attend_together(p, index, l, item, rows);
            else attend_chunk(p, index, l, item, rows);
        });
    }

    // The query rows of an item: one `Queries` for each of its key-value heads, more where a group of heads exceeds a tile. As
    // many again stand behind them for the sequences one by one.
    struct Rows {
        Queries* first;
        int count, kv_head, tiles;
        int key_head(int t) const { return kv_head + t / tiles; }
    };
    int first_head(const Rows& rows, int t) const { return rows.key_head(t) * group + t % rows.tiles * ROWS; }
    int heads_of(const Rows& rows, int t) const { return std::min(ROWS, group - t % rows.tiles * ROWS); }

    void take(Queries& a, int r, int row, int head, int window) const {
        std::memcpy(a.q + r * dim, ready(row, head), dim * 2);
        a.to[r] = position[row] + 1;
        a.from[r] = window ? std::max(0, a.to[r] - window) : 0;
    }
    void give(const Queries& a, int r, int row, int head) {
        for (int c = 0; c < m.head_dim; c += 16) narrow(mixed.at(row, head * m.head_dim + c), load(a.out + r * dim + c) * (1.f / a.total[r]));
    }
    // Blocks [begin, end) of a sequence. `fresh`: the token whose key and value belong into the last one and are not there yet,
    // -1 where there is none. While a block is looked at the next one comes from memory.
    void look_at(Queries* first, const Rows& rows, const Pass& p, int index, int s, int begin, int end, int fresh) const {
        const int32_t* table = p.tables + (size_t)s * p.width;
        const size_t one = 2 * dim * SIDE;
        for (int b = begin; b < end; b++) {
            const bf16* next = b + 1 < end ? keys(index, table[b + 1], rows.kv_head) : nullptr;
            for (int t = 0; t < rows.count; t++) {
                const int head = t / rows.tiles;
                bf16* k = keys(index, table[b], rows.kv_head + head);
                if (t % rows.tiles == 0) {
                    if (next && fresh >= 0) fetch(next + head * one, one * sizeof(bf16));
                    if (b == end - 1 && fresh >= 0) remember(p, index, fresh, rows.kv_head + head);
                }
                look(first[t], k, k + dim * SIDE, b * SIDE, m.layer[index].scale * 1.44269504f);
            }
        }
    }

    void attend_chunk(const Pass& p, int index, const Layer& l, const Item& item, const Rows& rows) {
        int first = p.starts[item.place] + item.first;
        for (int t = 0; t < rows.count; t++) {
            Queries& a = rows.first[t];
            int heads = heads_of(rows, t);
            a.rows = item.tokens * heads;
            for (int r = 0; r < a.rows; r++) take(a, r, first + r / heads, first_head(rows, t) + r % heads, l.window);
            a.begin();
        }
        const Queries& any = rows.first[0];
        look_at(rows.first, rows, p, index, item.place, any.from[0] / SIDE, up(any.to[any.rows - 1]), -1);
        for (int t = 0; t < rows.count; t++)
            for (int r = 0, heads = heads_of(rows, t); r < rows.first[t].rows; r++) give(rows.first[t], r, first + r / heads, first_head(rows, t) + r % heads);
    }

    // Several sequences over the blocks they share, then each over its own.
    void attend_together(const Pass& p, int index, const Layer& l, const Item& item, const Rows& rows) {
        int low = item.shared;
        for (int t = 0; t < rows.count; t++) {
            Queries& a = rows.first[t];
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
            Queries* own = rows.first + rows.count;
            for (int t = 0; t < rows.count; t++) own[t].split(rows.first[t], i * heads_of(rows, t), heads_of(rows, t));
            look_at(own, rows, p, index, s, std::max(item.shared, own[0].from[0] / SIDE), up(own[0].to[0]), p.starts[s]);
            for (int t = 0; t < rows.count; t++)
                for (int r = 0; r < own[t].rows; r++) give(own[t], r, p.starts[s], first_head(rows, t) + r);
        }
    }

    void head(const Pass& p) {
        int n = p.rows_count, steps = up(m.head.k);
        size_t ld = (size_t)up(m.vocabulary) * SIDE;
        normalise(n, m.norm, p.rows, p.broken, m.layers - 1);
        team.each(up(m.head.n), [&](int panel) {
            for (int b = 0; b < up(n); b++)
                multiply<false>(h.block(b, 0), m.head.packed + (size_t)panel * steps * AREA, steps, p.logits + b * SIDE * ld + panel * SIDE, ld, n - b * SIDE <= 16);
        });
    }
};

}  // namespace

extern "C" {

int headrace_begin() { return tiles_allowed(); }

void* headrace_open(const Cache* cache, int threads) { return new Decoder(*cache, threads); }
void headrace_close(void* decoder) { delete (Decoder*)decoder; }
void headrace_use(void* decoder, const Model* model) { ((Decoder*)decoder)->use(*model); }
void headrace_forward(void* decoder, const Pass* pass) { ((Decoder*)decoder)->forward(*pass); }

void headrace_pack(const bf16* w, int k, const int32_t* rows, int n, bf16* packed) {
    for (int panel = 0; panel < up(n); panel++) pack_panel(w, k, rows, n, panel, packed);
}

// One draw for each of `rows` of logits [?, ld]; see sampling.h.
void headrace_draw(void* decoder, const float* logits, const int64_t* rows, int count, int vocabulary, int64_t ld,
                   const float* inverse_temperature, const double* u, int64_t* tokens, double* logprobs) {
    Team& team = ((Decoder*)decoder)->team;
    team.run([&] {
        NoDenormals flushed;
        std::vector<double> sums(vocabulary / SEARCH + 1);
        team.each(count, [&](int r) {
            Draw one = draw(logits + rows[r] * ld, vocabulary, inverse_temperature[r], u[r], sums.data());
            tokens[r] = one.token, logprobs[r] = one.logprob;
        });
    });
}
}
