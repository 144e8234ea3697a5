// One forward pass of a Llama-like decoder as one plan for a team of threads.
//
//   embed | norm  qkv  rotate+store  attend  out(+=)  norm  gate_up*act  down(+=) | ... | norm  head
//
// In a layer that convolves, or follows a recurrence, other phases stand in the place of those between qkv and out (convolution.h, recurrence.h), or before
// them.
//
// Each word is a phase: its items are distributed over the threads, and the next phase begins when all are done (team.h). The
// functions below list all phases before the first begins. The residual stream is float32 and lies in the blocks of packing.h, so
// `out` and `down` add to it where they store their tiles.
#include "mixture.h"
#include "quantising.h"
#include "sampling.h"

namespace {

struct Decoder : Mixture {
    using Mixture::Mixture;
    Blocks<float> per_layer, narrow;  // [N, layers * per_layer], [N, per_layer]
    Blocks<taken> bent;               // [N, per_layer]
    std::vector<std::vector<int32_t>> kept;  // tokens of each row of the last draws, where some were cut

    void forward(const Pass& p) {
        arrange(p);
        plan.phases.clear();
        embed(p);
        if (m.per_layer) embed_per_layer(p);
        note(p, 0);
        for (int i = 0; i < m.layers; i++) {
            layer(p, i, m.layer[i]);
            note(p, i + 1);
        }
        head(p);
        team.run(plan.phases.data(), (int)plan.phases.size());
    }

    void embed(const Pass& p) {
        plan.each(p.tokens_count, [=, &p](int row) {
            const stored* from = m.embed + p.tokens[row] * m.hidden;
            p.broken[row] = -1;
            for (int c = 0; c < up(m.hidden) * SIDE; c++) *x.at(row, c) = c < m.hidden ? read1(from + c) * m.embed_scale : 0;
        });
    }

    // The embeddings of each layer's own: of the token, and of its embedding under a norm.
    void embed_per_layer(const Pass& p) {
        const int n = p.tokens_count, wide = m.layers * m.per_layer;
        per_layer.size(n, wide), narrow.size(n, m.per_layer), bent.size(n, m.per_layer);
        normalise(n, nullptr, nullptr, p.broken, 0);
        product<false>(p, m.layers, 0, m.per_layer_into, h, per_layer);
        plan.each(n, [=, &p](int row) {
            const stored* token = m.per_layer_embed + p.tokens[row] * wide;
            const float by_root = 1 / std::sqrt((float)m.hidden), own = std::sqrt((float)m.per_layer);
            for (int first = 0; first < wide; first += m.per_layer) {
                f16x squares = {};
                for (int c = first; c < first + m.per_layer; c += 16) squares += load(per_layer.at(row, c)) * by_root * (load(per_layer.at(row, c)) * by_root);
                const float by = ::inverse_rms(squares, m.per_layer, m.eps) * by_root;
                for (int c = first; c < first + m.per_layer; c += 16)
                    store(per_layer.at(row, c), (load(per_layer.at(row, c)) * by * load(m.per_layer_norm + c - first) + read(token + c) * own) * 0.70710678118f);
            }
        });
    }

    // What a layer's own embedding adds, through a gate that the residual stream opens.
    void add_per_layer(const Pass& p, int index, const Layer& l) {
        const int n = p.tokens_count;
        normalise(n, nullptr, nullptr, p.broken, index);
        product<false>(p, index, 4, l.per_layer_gate, h, narrow);
        plan.each(n, [=](int row) {
            for (int c = 0; c < m.per_layer; c += 16)
                write(bent.at(row, c), activated(load(narrow.at(row, c)), m.activation == GELU_TANH) * load(per_layer.at(row, index * m.per_layer + c)));
        });
        add(p, index, 5, l.per_layer_out, bent, l.after_per_layer, l.scale_behind);
    }

    void note(const Pass& p, int index) {
        if (!p.stream) return;
        plan.each(p.tokens_count, [=, &p](int row) {
            float* to = p.stream + ((size_t)index * p.tokens_count + row) * m.hidden;
            for (int c = 0; c < m.hidden; c++) to[c] = *x.at(row, c);
        });
    }

    void layer(const Pass& p, int index, const Layer& l) {
        int n = p.tokens_count;
        const bool mixes = l.qkv.n || l.value_heads;
        if (mixes) normalise(n, l.input_norm, nullptr, p.broken, index - 1);
        if (l.value_heads) {
            product<false>(p, index, 6, l.into_recurrence, h, qkv);
            follow(p, index, l);
            add(p, index, 7, l.out_of_recurrence, mixed, l.after_attention);
        }
        if (l.qkv.n) {  // perhaps beside a recurrence, of the same input
            product<false>(p, index, 0, l.qkv, h, qkv);
            if (l.kernel && !l.value_heads) convolve(p, index, l);
            else rotate(p, index, l), attend(p, index, l);
            add(p, index, 1, l.out, mixed, l.after_attention);
        }
        if (!l.down.n) return;
        if (!m.parallel) normalise(n, l.mlp_norm, nullptr, p.broken, mixes ? index : index - 1);
        if (l.experts) mix(p, l);
        if (l.experts && l.shared_down.n) share(p, index, l);
        if (l.experts) return;
        gate(p, index, l.gate_up);
        add(p, index, 3, l.down, act, l.after_mlp, l.per_layer_gate.n ? 1 : l.scale_behind);
        if (l.per_layer_gate.n) add_per_layer(p, index, l);
    }

    void head(const Pass& p) {
        int n = p.rows_count;
        size_t ld = (size_t)up(m.vocabulary) * SIDE;
        normalise(n, m.norm, p.rows, p.broken, m.layers - 1);
        plan.each(up(m.head.n), [=, &p](int panel, int next) {
            float* sums = sums_of(n);
            times<false>(m.head, panel, next, up(m.head.n), n, blocks_of(h), [&](int b) { return sums + b * AREA; });
            for (int i = 0; m.logit_cap > 0 && i < n * SIDE; i += 16) store(sums + i, capped(load(sums + i), m.logit_cap));
            for (int r = 0; r < n; r++) stream(p.logits + r * ld + panel * SIDE, load(sums + r * SIDE), load(sums + r * SIDE + 16));
            streamed();
        });
    }
};

}  // namespace

extern "C" {

int headrace_begin() { return executable() && tiles_allowed(); }
const char* headrace_tier() { return TIER; }
int headrace_taken_bytes() { return sizeof(taken); }

void* headrace_open(const Cache* cache, int threads) { return new Decoder(*cache, threads); }
void headrace_close(void* decoder) { delete (Decoder*)decoder; }
void headrace_use(void* decoder, const Model* model) { ((Decoder*)decoder)->use(*model); }
void headrace_forward(void* decoder, const Pass* pass) { ((Decoder*)decoder)->forward(*pass); }

void headrace_pack(const stored* w, int k, const int32_t* rows, int n, stored* packed) {
    for (int panel = 0; panel < up(n); panel++) pack_panel(w, k, rows, n, panel, packed);
}

// Fills the codes and scales of `into`. Output j is row rows[j] of `w` [?, into.k]; codes have `levels` steps on either side of zero.
void headrace_quantise(const stored* w, const int32_t* rows, int levels, const Linear* into) {
    for (int panel = 0; panel < up(into->n); panel++) quantise_panel(w, rows, *into, panel, levels);
}

// c = x times w, both in blocks of 32 rows, in the calling thread, for tests and benchmarks.
void headrace_product(const taken* x, int rows, const Linear* w, float* c) {
    Ready ready;
    for (int panel = 0; panel < up(w->n); panel++)
        Dense::times<false>(
            *w, panel, panel + 1, up(w->n), rows, [&](int b) { return Inputs<taken>{x + (size_t)b * up(w->k) * AREA}; },
            [&](int b) { return c + ((size_t)b * up(w->n) + panel) * AREA; });
}

// What is drawn from each row; see sampling.h.
void headrace_draw(void* decoder, const Draws* draws) {
    Decoder& self = *(Decoder*)decoder;
    self.kept.resize(std::max(self.kept.size(), (size_t)draws->count));
    const Phase all = Phase::of(draws->count, [&](int r, int) {
        thread_local Sampler sampler;
        sampler.draw(*draws, r);
        if (draws->kept[r]) self.kept[r] = sampler.ids;
    });
    self.team.run(&all, 1);
}

// The tokens kept of each row of the last draws, `counts` [rows] of them, one after the other.
void headrace_kept(void* decoder, const int64_t* counts, int rows, int32_t* ids) {
    for (int r = 0; r < rows; r++) ids = std::copy_n(((Decoder*)decoder)->kept[r].begin(), counts[r], ids);
}
}
