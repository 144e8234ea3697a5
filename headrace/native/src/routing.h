// A mixture of experts, for engine and trainer: the router's scores, its choice, and the sum of what the chosen experts return.
#pragma once
#include <algorithm>

#include "vec.h"

constexpr int MOST_EXPERTS = 1024;

// The scores of all experts for one row. at(c): its inputs from c on, sixteen. router [experts, width], with zeros up to a multiple of 16.
template <class At>
static inline void score_experts(const At& at, const float* router, int width, int experts, float* score) {
    constexpr int EACH = 4;  // sums that are in flight together
    for (int e = 0; e < experts; e += EACH) {
        const float* from[EACH];
        for (int i = 0; i < EACH; i++) from[i] = router + (size_t)std::min(e + i, experts - 1) * width;
        f16x dot[EACH] = {};
        for (int c = 0; c < width; c += 16) {
            const f16x x = at(c);
            for (int i = 0; i < EACH; i++) dot[i] += x * load(from[i] + c);
        }
        for (int i = 0; i < EACH && e + i < experts; i++) score[e + i] = sum(dot[i]);
    }
}

// The chosen experts of one row, best first and the first among equals, or those that are `recorded` in `which`. Their weights: a softmax
// over all experts, divided by its sum over the chosen ones if `normalise`. The scores are used up.
template <class I>
static inline void choose_experts(float* score, int experts, int chosen, bool normalise, bool recorded, I* which, float* weights) {
    float high = -1e30f, total = 0, kept = 0;
    for (int e = 0; e < experts; e++)
        if (score[e] > high) high = score[e];
    for (int e = 0; e < experts; e++) total += score[e] = std::exp(score[e] - high);
    for (int i = 0; i < chosen; i++) {
        int best = recorded ? which[i] : 0;
        for (int e = 1; !recorded && e < experts; e++)
            if (score[e] > score[best]) best = e;
        kept += weights[i] = score[best] / total;
        if (!recorded) which[i] = best, score[best] = -1;
    }
    for (int i = 0; normalise && i < chosen; i++) weights[i] /= kept;
}

// Sixteen numbers of a mixture: told(i) of the chosen expert i, by their weights, best first.
template <class Told>
static inline f16x weighed(const Told& told, const float* weights, int chosen) {
    f16x all = {};
    for (int i = 0; i < chosen; i++) all += told(i) * weights[i];
    return all;
}
