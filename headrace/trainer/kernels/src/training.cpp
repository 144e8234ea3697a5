// The trainer's kernels: the operations of a forward and a backward pass; each call is one operation on contiguous arrays.
// `wide`: float32 (1) or bf16 (0); if there are two, the first is x's.
#include "attention.h"
#include "experts.h"

namespace {
template <class S, class T>
Norm<S, T> norm(const void* x, const float* weight, void* y, float* scale, int rows, int n, float eps, float unit, const float* onto = nullptr) {
    return {(const S*)x, weight, (T*)y, scale, rows, n, eps, unit, onto};
}
template <class S, class T>
void norm_back(const Norm<S, T>& n, const void* dy, void* dx, float* weight_gradient, float* parts) {
    n.backward((const T*)dy, (S*)dx, weight_gradient ? parts : nullptr);
    if (weight_gradient) gather(parts, stretches(n.rows), n.n, weight_gradient, false);
}
template <class T>
void weight_gradient(const T* x, int rows, int k, const Weight<T>* weights, int count) {
    static thread_local Arena room;
    int widest = 0;
    for (int i = 0; i < count; i++) widest = std::max(widest, weights[i].n);
    room.grow(room_of<T>(rows, k, widest) * sizeof(T));
    linear_weight_gradient(x, rows, k, weights, count, (T*)room.data);
}
}  // namespace

extern "C" {

int headrace_begin() {
    team::use_threads(1);
    return executable() && tiles_allowed();
}
const char* headrace_tier() { return TIER; }
void headrace_threads(int threads) { team::use_threads(threads); }

#define EITHER(DO) \
    if (wide) DO(float); \
    else DO(bf16)

void headrace_pack_weight(int wide, const float* w, int n, int k, void* across, void* down) {
#define DO(T) pack_weight(w, n, k, (T*)across, (T*)down)
    EITHER(DO);
#undef DO
}
void headrace_linear(int wide, const void* x, int rows, int k, const void* weights, int count) {
#define DO(T) linear((const T*)x, rows, k, (const Weight<T>*)weights, count)
    EITHER(DO);
#undef DO
}
void headrace_linear_input_gradient(int wide, void* dx, int rows, int k, const void* weights, int count) {
#define DO(T) linear_input_gradient((T*)dx, rows, k, (const Weight<T>*)weights, count)
    EITHER(DO);
#undef DO
}
void headrace_linear_weight_gradient(int wide, const void* x, int rows, int k, const void* weights, int count) {
#define DO(T) weight_gradient((const T*)x, rows, k, (const Weight<T>*)weights, count)
    EITHER(DO);
#undef DO
}

void headrace_linear_gated(const bf16* x, int rows, int k, const void* gate, const void* up, bf16* y, int gelu) {
    linear_gated(x, rows, k, *(const Weight<bf16>*)gate, *(const Weight<bf16>*)up, y, gelu);
}
void headrace_log_probabilities(int wide, const void* hidden, int rows, int k, const void* packed, int vocabulary, float inverse_temperature,
                                const int64_t* offsets, const int64_t* ids, const int64_t* targets, const int64_t* counts, const int64_t* set_of,
                                const uint8_t* sets, int64_t width, float* found, float* among, float* logsumexp, float* entropy) {
#define DO(T) \
    log_probabilities((const T*)hidden, rows, k, (const T*)packed, vocabulary, inverse_temperature, {offsets, ids, targets, counts, set_of, sets, width}, found, among, logsumexp, entropy)
    EITHER(DO);
#undef DO
}

#define NORMS(DO)                          \
    if (wide_x && wide_y) DO(float, float); \
    else if (wide_x) DO(float, bf16);       \
    else DO(bf16, bf16);

void headrace_norm(int wide_x, int wide_y, const void* x, const float* weight, void* y, float* scale, int rows, int n, float eps, float unit, const float* onto) {
#define DO(S, T) norm<S, T>(x, weight, y, scale, rows, n, eps, unit, onto).forward()
    NORMS(DO)
#undef DO
}
void headrace_norm_backward(int wide_x, int wide_y, const void* x, const float* weight, const float* scale, const void* dy, void* dx,
                            float* weight_gradient, float* parts, int rows, int n, float unit) {
#define DO(S, T) norm_back(norm<S, T>(x, weight, nullptr, (float*)scale, rows, n, 0, unit), dy, dx, weight_gradient, parts)
    NORMS(DO)
#undef DO
}

void headrace_gated(int wide, const void* gate, const void* up, void* y, int64_t count, int gelu) {
    if (wide) Gated<float>{count, (bool)gelu}.forward((const float*)gate, (const float*)up, (float*)y);
    else Gated<bf16>{count, (bool)gelu}.forward((const bf16*)gate, (const bf16*)up, (bf16*)y);
}
void headrace_gated_backward(int wide, const void* gate, const void* up, const void* dy, void* d_gate, void* d_up, int64_t count, int gelu) {
    if (wide) Gated<float>{count, (bool)gelu}.backward((const float*)gate, (const float*)up, (const float*)dy, (float*)d_gate, (float*)d_up);
    else Gated<bf16>{count, (bool)gelu}.backward((const bf16*)gate, (const bf16*)up, (const bf16*)dy, (bf16*)d_gate, (bf16*)d_up);
}

void headrace_rotary(int wide, const void* x, float* y, const float* cos, const float* sin, const float* weight, int rows, int heads, int dim,
                     float eps, float unit, int low) {
    if (wide) Rotary<float>{rows, heads, dim, cos, sin, weight, eps, unit, (bool)low}.forward((const float*)x, y);
    else Rotary<bf16>{rows, heads, dim, cos, sin, weight, eps, unit, (bool)low}.forward((const bf16*)x, y);
}
void headrace_rotary_backward(int wide, const void* x, const float* dy, void* dx, const float* cos, const float* sin, const float* weight,
                              float* weight_gradient, float* parts, int rows, int heads, int dim, float eps, float unit) {
    if (wide) Rotary<float>{rows, heads, dim, cos, sin, weight, eps, unit, false}.backward((const float*)x, dy, (float*)dx, parts);
    else Rotary<bf16>{rows, heads, dim, cos, sin, weight, eps, unit, false}.backward((const bf16*)x, dy, (bf16*)dx, parts);
    if (weight_gradient) gather(parts, stretches(rows), dim, weight_gradient, false);
}

void headrace_attention(int wide, const Trees* trees, const float* q, const float* k, const void* v, void* out, float* kept) {
    if (wide) Served<float>{*trees, q, k, (const float*)v}.attend((float*)out, kept);
    else Served<bf16>{*trees, q, k, (const bf16*)v}.attend((bf16*)out, kept);
}
void headrace_attention_backward(int wide, const Trees* trees, const float* q, const float* k, const void* v, const void* out, const float* kept,
                                 const void* d_out, float* dq, float* dk, void* dv) {
    if (wide) Attention<float>{*trees, q, k, (const float*)v, (const float*)out, kept}.backward((const float*)d_out, dq, dk, (float*)dv);
    else Attention<bf16>{*trees, q, k, (const bf16*)v, (const bf16*)out, kept}.backward((const bf16*)d_out, dq, dk, (bf16*)dv);
}

void headrace_router_scores(int wide, const void* x, int rows, int n, const float* router, int experts, float* scores) {
#define DO(T) router_scores((const T*)x, rows, n, router, experts, scores)
    EITHER(DO);
#undef DO
}
void headrace_choose(const float* scores, int rows, int experts, int chosen, int normalise, int recorded, int64_t* which, float* weights) {
    choose(scores, rows, experts, chosen, normalise, recorded, which, weights);
}
void headrace_experts(int wide, const Mixture* mixture, const void* x, float* out) {
#define DO(T) Experts<T>(*mixture).forward((const T*)x, out)
    EITHER(DO);
#undef DO
}
void headrace_experts_backward(int wide, const Mixture* mixture, const void* x, const void* d_out, void* by_x, float* by_weights) {
#define DO(T) Experts<T>(*mixture).backward((const T*)x, (const T*)d_out, (T*)by_x, by_weights)
    EITHER(DO);
#undef DO
}
}
