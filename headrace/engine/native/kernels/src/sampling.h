// Draws one token from each row of logits by inverse CDF in two levels, as sampler.py does: no random number per entry.
#pragma once
#include "formulas.h"

struct Draw {
    int64_t token;
    double logprob;  // NaN if the row held NaN or +inf
};

// logits [vocabulary], readable up to the next multiple of 16. `u` in [0, 1); negative takes the most probable entry.
static inline Draw draw(const float* logits, int vocabulary, float inverse_temperature, double u, double* sums) {
    const float scale = inverse_temperature * 1.44269504f;
    f16x high = splat(-INFINITY);
    i16x whole = {};  // lanes that saw NaN or +inf
    auto logit = [&](int i) { return i + 16 <= vocabulary ? load(logits + i) : within(load(logits + i), i, 0, vocabulary); };
    for (int i = 0; i < vocabulary; i += 16) {
        f16x x = logit(i);
        high = max16(x, high);
        whole |= !(x < INFINITY);
    }
    float peak = largest(high);
    for (int lane = 0; lane < 16; lane++)
        if (whole[lane] || !(peak > -INFINITY)) return {0, NAN};
    auto weight = [&](int i) { return exp2_16((logit(i) - peak) * scale); };
    const double total = mass_of(logits, vocabulary, peak, scale, sums, [](f16x, f16x) {});
    const int stretches = (vocabulary + SEARCH - 1) / SEARCH;
    int64_t token = 0;
    if (u < 0) {
        while (logits[token] != peak) token++;
    } else {
        double target = u * total;
        int stretch = 0;
        while (stretch < stretches - 1 && sums[stretch] <= target) stretch++;
        double before = stretch ? sums[stretch - 1] : 0;
        int last = -1;
        for (int j = stretch * SEARCH; j < vocabulary && j < (stretch + 1) * SEARCH && (last < 0 || before <= target); j += 16) {
            f16x p = weight(j);
            for (int lane = 0; lane < 16 && (last < 0 || before <= target); lane++)
                if (p[lane] > 0) before += p[lane], last = j + lane;
        }
        token = last;  // rounding may leave target slightly above the last entry's sum: then it is the last one
    }
    return {token, log_probability(logits[token], peak, inverse_temperature, total)};
}

// The log-prob of a token over the whole vocabulary, or among the ids that filters kept, if there are any.
static inline double score(const float* logits, int vocabulary, float inverse_temperature, int64_t token, const int32_t* kept, int64_t count, double* sums) {
    if (count) return log_probability_among(logits, kept, count, logits[token], inverse_temperature);
    const float peak = peak_of(logits, vocabulary);
    const double total = mass_of(logits, vocabulary, peak, inverse_temperature * 1.44269504f, sums, [](f16x, f16x) {});
    return log_probability(logits[token], peak, inverse_temperature, total);
}
