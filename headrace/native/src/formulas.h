// Formulas that the engine and the trainer share. Each rounds at the same places wherever it is inlined: if the compiler
// could choose which of two products it fuses into the sum, the code makes the choice.
#pragma once
#include "vec.h"

// 1 / rms of n numbers, from the sum of their squares in sixteen parts (RMSNorm, arXiv:1910.07467).
static inline float inverse_rms(f16x squares, int n, float eps) { return 1.f / std::sqrt(sum(squares) / n + eps); }

// x + side by weight: what the norm of a layer's result adds to the residual stream.
static inline f16x plus_normed(f16x x, f16x side, float by, f16x weight) { return x + side * by * weight; }

// The two halves of a head, rotated by an angle (rotary embedding, arXiv:2104.09864): a cos - b sin, b cos + a sin.
struct Turned {
    float first, second;
};
static inline Turned turned(float a, float b, float cos, float sin) {
#if defined(__FMA__) || defined(__aarch64__)
    return {__builtin_fmaf(a, cos, -(b * sin)), __builtin_fmaf(b, cos, a * sin)};
#else
    return {a * cos - b * sin, b * cos + a * sin};
#endif
}

// SiLU (arXiv:1702.03118) is g sigmoid(g). GELU's tanh form (arXiv:1606.08415) is g sigmoid(2u) with the same u as there.
static inline f16x sigmoid(f16x z) { return inverse(1.f + exp16(select(z < -80.f, splat(80.f), -z))); }
static inline f16x within_sigmoid(f16x g, bool gelu) { return gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g; }
static inline f16x activated(f16x g, bool gelu) { return g * sigmoid(within_sigmoid(g, gelu)); }

// The gated activation of GPT-OSS (arXiv:2508.10925): (up + 1) gate sigmoid(alpha gate), gate up to the limit, up on both sides of zero.
struct Clamped {
    float alpha, limit;
    f16x operator()(f16x gate, f16x up) const {
        const f16x most = splat(limit);
        gate = select(gate > most, most, gate), up = select(up > most, most, select(up < -most, -most, up));
        return (up + 1.f) * gate * sigmoid(alpha * gate);
    }
};

// The tangent hyperbolic to about 1e-7 relative: near zero by Lambert's continued fraction, whose next term is below that.
static inline f16x tanh16(f16x x) {
    const f16x size = select(x < 0.f, -x, x), squared = x * x;
    const f16x near = x * ((squared + 105.f) * squared + 945.f) * inverse((15.f * squared + 420.f) * squared + 945.f);
    const f16x far = 1.f - 2.f * inverse(1.f + exp16(2.f * size));
    return select(size < 0.5f, near, select(size > 10.f, splat(1.f), far) * select(x < 0.f, splat(-1.f), splat(1.f)));
}
// A score or a logit x that a model bounds by `cap` (Gemma 2, arXiv:2408.00118).
static inline f16x capped(f16x x, float cap) { return cap * tanh16(x * (1 / cap)); }

// Softmax over a vocabulary: the sum of exp((logit - peak) / temperature). `scale`: log2(e) / temperature. Logits are readable up
// to the next multiple of 16. sums [vocabulary / SEARCH + 1]: the sum up to the end of each stretch. `also` is
// called with sixteen terms at a time and the distances of their logits below the peak.
constexpr int SEARCH = 256;
template <class F>
static inline double mass_of(const float* logits, int vocabulary, float peak, float scale, double* sums, const F& also) {
    double total = 0;
    for (int i = 0, stretch = 0; i < vocabulary; i += SEARCH, stretch++) {
        f16x part = {};
        for (int j = i; j < i + SEARCH && j < vocabulary; j += 16) {
            const f16x below = (j + 16 <= vocabulary ? load(logits + j) : within(load(logits + j), j, 0, vocabulary)) - peak;
            const f16x term = exp2_16(below * scale);
            part += term;
            also(term, below);
        }
        sums[stretch] = total += sum(part);
    }
    return total;
}
static inline double log_probability(float logit, float peak, float inverse_temperature, double mass) {
    return (double)(logit - peak) * inverse_temperature - std::log(mass);
}

// The largest of the logits; a number if any is.
static inline float peak_of(const float* logits, int vocabulary) {
    f16x high = splat(-INFINITY);
    for (int i = 0; i < vocabulary; i += 16) high = max16(i + 16 <= vocabulary ? load(logits + i) : within(load(logits + i), i, 0, vocabulary), high);
    return largest(high);
}

// The same sum over `count` ids alone, which filters have left to sample from.
template <class I>
static inline double mass_among(const float* logits, const I* ids, int64_t count, float peak, float inverse_temperature) {
    double mass = 0;
    for (int64_t i = 0; i < count; i += 16) {
        float below[16];
        for (int j = 0; j < 16; j++) below[j] = i + j < count ? logits[ids[i + j]] - peak : -INFINITY;
        mass += sum(exp2_16(load(below) * (inverse_temperature * 1.44269504f)));
    }
    return mass;
}

// The log-prob of a logit among those of `count` ids.
template <class I>
static inline double log_probability_among(const float* logits, const I* ids, int64_t count, float logit, float inverse_temperature) {
    float peak = logits[ids[0]];
    for (int64_t i = 1; i < count; i++) peak = logits[ids[i]] > peak ? logits[ids[i]] : peak;
    return log_probability(logit, peak, inverse_temperature, mass_among(logits, ids, count, peak, inverse_temperature));
}
