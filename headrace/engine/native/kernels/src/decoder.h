// Inputs of the decoder: plain structs that `binding.py` mirrors field by field. Python owns the memory behind all pointers.
#pragma once
#include "formulas.h"
#include "look.h"
#include "packing.h"

struct Linear {
    const stored* packed;  // panels of outputs; see product.h. Null: codes and scales are there instead
    const float* bias;     // [n up to 32] or null
    int32_t n, k;
    code* codes;    // panels of the quantised weights
    float* scales;  // [n up to 32]: what a code of 1 stands for, of each output
    const float* factors;  // [n up to 32]: of each output, before its bias; or null

    // Panel i of `count`, read from memory, and probably `next` after it.
    template <class W>
    Panel<W> panel(const W* all, int i, int next, int count) const {
        const size_t each = (size_t)up(k) * AREA;
        Panel<W> one = {all + i * each};
        if (next != i) one.then = all + (next < 0 || next >= count ? i : next) * each;
        return one;
    }
};
struct Layer {
    // A layer may lack attention or a feed-forward part, whose products then have no outputs. gate_up: 16 gates, then their 16 ups, and so on, or ups alone;
    // experts' are consecutive.
    Linear qkv, out, gate_up, down;
    const float *input_norm, *after_attention, *mlp_norm, *after_mlp;  // [hidden up to 32] or null
    const float *q_norm, *k_norm, *v_norm;                             // [head_dim] (or all heads') or null
    const float* sinks;                                                // [heads]: a score that each query sees beside its keys, and that has no value; or null
    int32_t window;                                                    // 0: none
    int32_t rotary;                                                    // index of the rotary table
    float scale, cap;                                                  // factor of the attention scores, and their bound (0: none)
    int32_t whole_norm;                                                // q_norm and k_norm normalise all heads together
    int32_t kv_heads, head_dim, turned;                                // turned: numbers of a head that have positions
    int32_t borrows;                                                   // whether its keys and values are those of a layer before: qkv is of queries alone
    int64_t cached;                                                    // numbers of a block of the cache in the layers whose keys and values lie before its own
    int32_t experts, chosen, normalise_chosen, mixture;                // 0 experts: dense; mixture: number of mixture layers before this one
    const float *router, *router_bias;                                 // [experts, hidden up to 32]; [experts] or null
    // A gated short convolution over `kernel` tokens (0: attention), with qkv and out for what is before and behind it: [kernel, hidden up to 32], the
    // current token last, and a bias or null. place: number of layers of the same kind before this one.
    const float *convolution, *convolution_bias;
    int32_t kernel, place;
    // A recurrence (recurrence.h) over heads of keys and of values (0: none), with a product for queries, keys, values, gates, and for each head what is taken
    // (of a delta rule alone) and its step: [value_heads], [value_heads], [value_width] or all values' [value_heads * value_width] or null, [value_heads]. Its convolution
    // is over queries, keys and values.
    const float *decay, *step_bias, *result_norm, *skip;
    int32_t key_heads, value_heads, key_width, value_width;
    int32_t corrects, gate_last;        // whether it is a delta rule, and not a state space; whether what is read is normed before its gate
    float shortest_step, longest_step;  // bounds of the steps
    int32_t gated, head_gated;  // whether a gate for each number that attention gives, or for each head, follows in qkv behind the values
    Linear shared_gate_up, shared_down;  // of an expert that serves every token beside the chosen ones; no outputs: there is none
    const float* shared_gate;            // [hidden up to 32]: the sigmoid of its product with a token is the factor of that expert; null: 1
    const float* choice_bias;            // [experts]: added to sigmoids where experts are chosen by them, or null
    int32_t sigmoid;                     // whether an expert's weight is the sigmoid of its score, and not a part of a softmax
    float chosen_scale, chosen_least;    // factor of these weights; what is added to the sum of sigmoids before it divides them
    Linear per_layer_gate, per_layer_out;  // products around the embedding of the layer's own; no outputs: there is none
    const float* after_per_layer;          // the norm of what that adds: [hidden up to 32]
    float scale_behind;                    // factor of the residual stream behind the layer
    Linear into_recurrence, out_of_recurrence;
};
struct LowRank {
    const stored *a, *b;  // A [rank, k] and B [n, rank] scale included, packed as the linear's weights; null: no adapter
    int64_t rank;
};
constexpr int PLACES = 8;
enum Activation : int32_t { SILU, GELU_TANH, CLAMPED, SQUARED };  // SQUARED: of what is positive of up, which has no gate
struct Model {
    int32_t layers, hidden, heads, inter, vocabulary, activation, mixtures;  // inter: the widest dense layer's
    int32_t neighbours;          // whether positions turn neighbours in a head, and not those of its two halves
    int32_t centred, parallel;   // whether norms take the mean off first, and whether the feed-forward part reads what attention does
    float eps, embed_scale, residual_scale, logit_cap;  // logit_cap: bound of the logits; 0: none
    Clamped clamped;  // of that activation
    const stored* embed;  // [vocabulary, hidden], not packed
    const Layer* layer;
    const float* norm;
    Linear head;
    const float* cos[2];  // [context, turned / 2 of the layers that use it]
    const float* sin[2];
    const float* query_factors;  // [context]: of the queries at each position, or null
    // Embeddings of each layer's own (Gemma 3n): numbers of one (0: none), those of a token [vocabulary, layers * per_layer], not packed, and what is added to
    // them of the token's embedding, with a norm [per_layer].
    int32_t per_layer;
    const stored* per_layer_embed;
    Linear per_layer_into;
    const float* per_layer_norm;
};
struct Cache {
    stored* data;    // of each layer with keys and values: [blocks][kv_heads][2][dim up to 32, 32]
    stored* inputs;  // [layers with convolutions][blocks][32][hidden up to 32]: what each token of a block brings to them
    int64_t blocks;
    float* states;       // [slots, state_size]: of a sequence each, for all layers with a recurrence one after the other
    int64_t state_size;
};
struct Pass {
    int32_t tokens_count, segments, width, rows_count, slots;
    const int64_t* tokens;    // [N]
    const int32_t* starts;    // [S + 1]
    const int32_t* context;   // [S]
    const int32_t* tables;    // [S, width]
    const int64_t* rows;      // [R]
    const int32_t* adapters;  // [S]
    const LowRank* low_rank;  // [slots][layers + 1][PLACES], in the order qkv, out, gate_up, down, per_layer_gate, per_layer_out, into and out of a recurrence; behind all layers per_layer_into
    float* logits;            // [R up to 32, vocabulary up to 32]
    uint16_t* routing;        // [N, mixtures, chosen] out, or null
    int32_t* broken;          // [N] out: first layer after which a hidden state was not finite, -1 if none
    const int32_t* states;    // [S]: slot of each sequence's state, if the model has any; what is in it counts from the first token of context on
    const int32_t* kept;      // [kept_count, 3]: segment, tokens that a state has seen, and the slot that it is copied to
    int32_t kept_count;
    float* stream;            // [layers + 1, N, hidden] out: the residual stream before the first layer and after each; or null
};
