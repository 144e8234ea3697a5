// The operations between the products, row by row: norms, gated activations, rotary embeddings.
// Each is one pass over memory in each direction; everything inside is float32.
#pragma once
#include "formulas.h"
#include "loops.h"

static inline int lanes(int n) { return (n + 15) / 16 * 16; }

// A row as float32 with zeros up to a multiple of 16, and back.
template <class T>
static inline const float* expand(const T* from, int n, float* to) {
    int c = 0;
    for (; c + 16 <= n; c += 16) store(to + c, read(from + c));
    for (; c < n; c++) to[c] = read1(from + c);
    for (; c < lanes(n); c++) to[c] = 0;
    return to;
}
template <class T>
static inline void shrink(const float* from, int n, T* to) {
    int c = 0;
    for (; c + 16 <= n; c += 16) write(to + c, load(from + c));
    for (; c < n; c++) write1(to + c, from[c]);
}
static inline float dot(const float* a, const float* b, int n) {
    f16x total = {};
    for (int c = 0; c < lanes(n); c += 16) total += load(a + c) * load(b + c);
    return sum(total);
}
static inline f16x squares(const float* a, int n) {
    f16x total = {};
    for (int c = 0; c < lanes(n); c += 16) total += load(a + c) * load(a + c);
    return total;
}
static inline f16x rounded(f16x v) {
    bf16 low[16];
    narrow(low, v);
    return widen(low);
}

// The rows that one thread takes at once, summing their parts of a weight's gradient: fixed, so that the order of sums is too.
constexpr int STRETCH = 32;
static inline int stretches(int rows) { return (rows + STRETCH - 1) / STRETCH; }

// to [n] += or = the sum of the parts of all stretches.
static void gather(const float* parts, int count, int n, float* to, bool add) {
    team::each((n + 255) / 256, [&](int item) {
        for (int c = item * 256; c < std::min(n, (item + 1) * 256); c++) {
            float total = add ? to[c] : 0.f;
            for (int i = 0; i < count; i++) total += parts[(size_t)i * n + c];
            to[c] = total;
        }
    });
}

// RMSNorm (arXiv:1910.07467) of x [rows, n]. `unit` is added to the weight (Gemma's norms store it less one), and the result to
// `onto` [rows, n] unless that is null.
template <class S, class T>
struct Norm {
    const S* x;
    const float* weight;
    T* y;
    float* scale;  // [rows]: 1 / rms
    int rows, n;
    float eps, unit;
    const float* onto;

    void forward() const {
        team::each(stretches(rows), [&](int item) {
            float *v = team::room<float>(4 * lanes(n)), *d = v + lanes(n), *w = d + lanes(n), *o = w + lanes(n);
            expand(weight, n, w);
            for (int c = 0; c < n; c++) w[c] += unit;
            for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++) {
                expand(x + (size_t)r * n, n, v);
                float by = scale[r] = inverse_rms(squares(v, n), n, eps);
                if (onto) expand(onto + (size_t)r * n, n, o);
                for (int c = 0; c < lanes(n); c += 16)
                    store(d + c, onto ? plus_normed(load(o + c), load(v + c), by, load(w + c)) : load(v + c) * by * load(w + c));
                shrink(d, n, y + (size_t)r * n);
            }
        });
    }

    // dx from dy. parts: [stretches, n], of the weight's gradient, or null.
    void backward(const T* dy, S* dx, float* parts) const {
        team::each(stretches(rows), [&](int item) {
            float *v = team::room<float>(4 * lanes(n)), *g = v + lanes(n), *w = g + lanes(n), *dw = w + lanes(n);
            expand(weight, n, w);
            for (int c = 0; c < n; c++) w[c] += unit;
            std::fill(dw, dw + lanes(n), 0.f);
            for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++) {
                expand(x + (size_t)r * n, n, v);
                expand(dy + (size_t)r * n, n, g);
                float by = scale[r];
                for (int c = 0; c < lanes(n); c += 16) {
                    store(dw + c, load(dw + c) + load(g + c) * load(v + c) * by);
                    store(g + c, load(g + c) * load(w + c));
                }
                float along = dot(g, v, n) * by * by / n;
                for (int c = 0; c < lanes(n); c += 16) store(g + c, by * (load(g + c) - load(v + c) * along));
                shrink(g, n, dx + (size_t)r * n);
            }
            if (parts) std::memcpy(parts + (size_t)item * n, dw, n * sizeof(float));
        });
    }
};

// act(gate) * up over `count` elements: SiLU (arXiv:1702.03118), or GELU in its tanh form (arXiv:1606.08415), which is
// g sigmoid(2u); gated as in arXiv:2002.05202.
template <class T>
struct Gated {
    static constexpr int CHUNK = 8192;
    int64_t count;
    bool gelu;

    f16x slope(f16x g) const { return gelu ? 1.5957691216f * (1.f + 0.134145f * g * g) : splat(1.f); }

    template <class F>
    void over(const F& f) const {
        team::each((int)((count + CHUNK - 1) / CHUNK), [&](int item) {
            int64_t last = std::min(count, (int64_t)(item + 1) * CHUNK), i = (int64_t)item * CHUNK;
            for (; i + 16 <= last; i += 16) f(i, 16);
            if (i < last) f(i, (int)(last - i));
        });
    }
    static f16x some(const T* from, int n) {
        if (n == 16) return read(from);
        alignas(64) float v[16];
        return load(expand(from, n, v));
    }
    static void keep(T* to, f16x v, int n) {
        if (n == 16) return write(to, v);
        alignas(64) float s[16];
        store(s, v);
        shrink(s, n, to);
    }

    void forward(const T* gate, const T* up, T* y) const {
        over([&](int64_t i, int n) {
            f16x g = some(gate + i, n);
            keep(y + i, activated(g, gelu) * some(up + i, n), n);
        });
    }
    void backward(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up) const {
        over([&](int64_t i, int n) {
            f16x g = some(gate + i, n), u = some(up + i, n), d = some(dy + i, n), s = sigmoid(within_sigmoid(g, gelu));
            keep(d_up + i, d * g * s, n);
            keep(d_gate + i, d * u * (s + g * s * (1.f - s) * slope(g)), n);
        });
    }
};

// Rotary embedding (arXiv:2104.09864) of the heads of each token, after an RMSNorm of each head if there is a weight.
template <class T>
struct Rotary {
    int rows, heads, dim;
    const float *cos, *sin;  // [rows, dim]
    const float* weight;     // [dim] or null
    float eps, unit;
    bool low;  // the result is float32 even so, rounded to bf16

    void forward(const T* x, float* y) const {
        team::each(stretches(rows), [&](int item) {
            float *v = team::room<float>(3 * lanes(dim)), *o = v + lanes(dim), *w = o + lanes(dim);
            prepare(w);
            for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++)
                for (int h = 0; h < heads; h++) {
                    size_t at = ((size_t)r * heads + h) * dim;
                    expand(x + at, dim, v);
                    if (weight) {
                        float by = inverse_rms(squares(v, dim), dim, eps);
                        for (int c = 0; c < dim; c++) v[c] = v[c] * by * w[c];
                    }
                    const float *cs = cos + (size_t)r * dim, *sn = sin + (size_t)r * dim;
                    for (int a = 0, b = dim / 2; b < dim; a++, b++) {
                        const Turned both = turned(v[a], v[b], cs[a], sn[a]);
                        o[a] = both.first, o[b] = both.second;
                    }
                    for (int c = 0; low && c < lanes(dim); c += 16) store(o + c, rounded(load(o + c)));
                    shrink(o, dim, y + at);
                }
        });
    }

    // parts: [stretches, dim], the gradient of the weight.
    void backward(const T* x, const float* dy, T* dx, float* parts) const {
        team::each(stretches(rows), [&](int item) {
            float *v = team::room<float>(5 * lanes(dim)), *g = v + lanes(dim), *w = g + lanes(dim), *o = w + lanes(dim), *dw = o + lanes(dim);
            prepare(w);
            std::fill(dw, dw + lanes(dim), 0.f);
            std::fill(o, o + lanes(dim), 0.f);
            for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++)
                for (int h = 0; h < heads; h++) {
                    size_t at = ((size_t)r * heads + h) * dim;
                    expand(dy + at, dim, g);
                    const float *cs = cos + (size_t)r * dim, *sn = sin + (size_t)r * dim;
                    for (int a = 0, b = dim / 2; b < dim; a++, b++) {
                        o[a] = g[a] * cs[a] + g[b] * sn[b];
                        o[b] = g[b] * cs[b] - g[a] * sn[a];
                    }
                    if (weight) norm_backward(x + at, v, o, w, dw);
                    shrink(o, dim, dx + at);
                }
            if (parts) std::memcpy(parts + (size_t)item * dim, dw, dim * sizeof(float));
        });
    }

   private:
    void prepare(float* w) const {
        if (!weight) return;
        expand(weight, dim, w);
        for (int c = 0; c < dim; c++) w[c] += unit;
    }
    void norm_backward(const T* x, float* v, float* g, const float* w, float* dw) const {
        expand(x, dim, v);
        float by = inverse_rms(squares(v, dim), dim, eps);
        for (int c = 0; c < dim; c++) {
            dw[c] += g[c] * v[c] * by;
            g[c] *= w[c];
        }
        float along = dot(g, v, dim) * by * by / dim;
        for (int c = 0; c < dim; c++) g[c] = by * (g[c] - v[c] * along);
    }
};
