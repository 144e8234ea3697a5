// Draws a token from each of some rows of logits by inverse CDF, and tells which tokens its filters kept, as sampler.py does where there
// are no kernels. Without filters: a stretch of the vocabulary, then a token in it. With filters: the tokens that may be kept, by a cut
// that is surely low enough; the last one kept, by selection in float64; a token among those that are left. Nothing is sorted but the
// tokens that a request wants listed.
#pragma once
#include <algorithm>
#include <limits>

#include "formulas.h"

struct Draws {  // see `drawing.py`
    int32_t count, vocabulary, listed;  // rows; entries of each; columns of `top_ids`
    int32_t width;                      // numbers from one row of logits to the next
    const float* logits;                // readable up to the next multiple of 16
    const int64_t* rows;                // [count] which rows of the logits
    const double* temperature;          // [count] 0: the most probable token
    const double* u;                    // [count] in [0, 1)
    const int64_t* top_k;               // [count] 0: keeps all
    const double* top_p;                // [count] 1: keeps all
    const double* min_p;                // [count] how far below the largest logit one may be that min-p keeps, as a number below 0; or -infinity
    const uint8_t* masked;              // [count] whether the tokens kept are asked for
    const int32_t* tops;                // [count] most probable tokens to be listed
    const int64_t* left;                // [count] tokens from which filters can cut
    const int64_t* given;               // [count] tokens whose log-probs are asked for, and none is drawn; or null
    int64_t* tokens;                    // [count] out
    double* logprobs;                   // [count] out, NaN if the row held NaN or +infinity
    int64_t* kept;                      // [count] out: the number of tokens kept; 0 if none was cut, or if not asked for
    int32_t* top_ids;                   // [count, listed] out
    double* top_logprobs;               // [count, listed] out
};

// e^x for -708 <= x <= 0, to about 2e-16 relative. A loop over it becomes one over vectors.
static inline double exponential(double x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, which the lowest bits then hold
    const double shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double p = 1. / 6227020800;
    p = p * r + 1. / 479001600;
    p = p * r + 1. / 39916800;
    p = p * r + 1. / 3628800;
    p = p * r + 1. / 362880;
    p = p * r + 1. / 40320;
    p = p * r + 1. / 5040;
    p = p * r + 1. / 720;
    p = p * r + 1. / 120;
    p = p * r + 1. / 24;
    p = p * r + 1. / 6;
    p = p * r + .5;
    p = p * r + 1;
    p = p * r + 1;
    int64_t whole, bits;
    std::memcpy(&whole, &shifted, 8), std::memcpy(&bits, &p, 8);
    bits += (int64_t)((uint64_t)whole << 52);
    std::memcpy(&p, &bits, 8);
    return p;
}

class Sampler {
    static constexpr size_t FEW = 256;  // tokens that are selected from as they are

   public:
    std::vector<int32_t> ids;  // tokens kept, ascending, if some were cut

    void draw(const Draws& d, int r) {
        d.tokens[r] = 0, d.kept[r] = 0, ids.clear();
        for (int i = 0; i < d.listed; i++) d.top_ids[r * d.listed + i] = -1, d.top_logprobs[r * d.listed + i] = -INFINITY;
        logits = d.logits + d.rows[r] * d.width, vocabulary = d.vocabulary;
        const bool greedy = d.temperature[r] == 0;
        temperature = greedy ? 1 : d.temperature[r], by = (float)(1 / temperature);
        const bool filtered = !greedy && !d.given && (d.top_k[r] > 0 || d.top_p[r] < 1 || d.min_p[r] > -INFINITY);
        if (!look(filtered || d.tops[r])) {
            d.logprobs[r] = NAN;
            return;
        }
        if (filtered) filter(d.top_k[r], d.top_p[r], d.min_p[r]);
        const bool cut = filtered && (int64_t)ids.size() < d.left[r];
        const int64_t among = filtered ? drawn_among(d.u[r]) : -1;
        const double mass = cut ? mass_among(logits, ids.data(), ids.size(), peak, by) : mass_of_all();
        d.tokens[r] = d.given ? d.given[r] : filtered ? among : greedy ? first_of_the_largest() : drawn(d.u[r] * mass);
        d.logprobs[r] = log_probability(logits[d.tokens[r]], peak, by, mass);
        if (d.tops[r]) list(d.tops[r], filtered, mass, d.top_ids + r * d.listed, d.top_logprobs + r * d.listed);
        if (cut && d.masked[r]) d.kept[r] = ids.size();
    }

   private:
    const float* logits = nullptr;
    int vocabulary = 0;
    double temperature = 1;
    float by = 1, peak = 0;      // 1 / temperature; the largest logit
    std::vector<float> maxima;   // of groups of sixteen tokens
    std::vector<float> some;     // logits of `ids`, or others
    std::vector<double> wide;    // the same in float64: a choice of float64 by float32 numbers, GCC 12 makes vectors of that choose wrongly
    std::vector<double> sums;    // up to the end of each stretch, or of each token kept
    std::vector<std::pair<float, double>> weighed;

    f16x logit(int i) const { return i + 16 <= vocabulary ? load(logits + i) : within(load(logits + i), i, 0, vocabulary); }
    // The weights of `count` logits: exp((x - peak) / temperature), of very small ones e^-700.
    void weigh(const float* x, size_t count, double* __restrict weights) const {
        const double high = peak, at = temperature;
        const float least = (float)(high - 700 * at);
        for (size_t i = 0; i < count; i++) {
            const float safe = x[i] > least ? x[i] : least;
            weights[i] = exponential((safe - high) / at);
        }
    }

    // The largest logit, and the maxima of groups if they are `wanted`. False if the row holds NaN or +infinity, or nothing else than -infinity.
    bool look(bool wanted) {
        const int stretches = (vocabulary + SEARCH - 1) / SEARCH;
        if (wanted) maxima.resize(stretches * 16);
        f16x high = splat(-INFINITY);
        i16x whole = {};  // lanes that saw NaN or +infinity
        for (int s = 0; s < stretches; s++) {
            f16x here = splat(-INFINITY);
            for (int i = s * SEARCH; i < (s + 1) * SEARCH && i < vocabulary; i += 16) {
                const f16x x = logit(i);
                here = max16(x, here);
                whole |= !(x < INFINITY);
            }
            if (wanted) store(maxima.data() + s * 16, here);
            high = max16(here, high);
        }
        peak = largest(high);
        for (int lane = 0; lane < 16; lane++)
            if (whole[lane]) return false;
        return peak > -INFINITY;
    }

    double mass_of_all() {
        sums.resize(vocabulary / SEARCH + 1);
        return mass_of(logits, vocabulary, peak, by * 1.44269504f, sums.data(), [](f16x, f16x) {});
    }

    int64_t first_of_the_largest() const {
        int64_t token = 0;
        while (logits[token] != peak) token++;
        return token;
    }

    // The token in which `target` falls, where the sums are those of `mass_of_all`.
    int64_t drawn(double target) const {
        const int stretches = (vocabulary + SEARCH - 1) / SEARCH;
        int stretch = 0;
        while (stretch < stretches - 1 && sums[stretch] <= target) stretch++;
        double before = stretch ? sums[stretch - 1] : 0;
        int last = -1;
        for (int j = stretch * SEARCH; j < vocabulary && j < (stretch + 1) * SEARCH && (last < 0 || before <= target); j += 16) {
            const f16x p = exp2_16((logit(j) - peak) * (by * 1.44269504f));
            for (int lane = 0; lane < 16 && (last < 0 || before <= target); lane++)
                if (p[lane] > 0) before += p[lane], last = j + lane;
        }
        return last;  // rounding may leave target slightly above the last entry's sum: then it is the last one
    }

    // -- filters

    // Leaves the tokens that top-k, then top-p, then min-p keep. Those that are equal to the last one kept are kept.
    void filter(int64_t top_k, double top_p, double min_p) {
        const double lower = peak + min_p;
        double threshold;
        if (top_k > 0) {
            gather(lowest_of(top_k));
            if (top_k < (int64_t)some.size()) {
                std::nth_element(some.begin(), some.begin() + (top_k - 1), some.end(), std::greater<float>());
                keep(some[top_k - 1]);
            }
            threshold = top_p < 1 ? reached(top_p, -1, std::numeric_limits<float>::lowest()) : -INFINITY;
        } else if (top_p < 1) {
            const double total = weight_of_all();
            // Tokens below this cannot sum to 1 - top_p, even if all of the vocabulary were.
            const double bound = peak + temperature * std::log((1 - top_p) * total / (vocabulary + SEARCH));
            const float cut = below(std::max(bound, lower));
            gather(cut);
            threshold = reached(top_p, total, cut);
        } else {
            gather(below(lower));
            threshold = -INFINITY;
        }
        keep(std::max(threshold, lower));
    }

    // A logit that at least `count` tokens reach.
    float lowest_of(int64_t count) {
        constexpr float all = std::numeric_limits<float>::lowest();  // all but those that the model forbids
        if (count > (int64_t)maxima.size()) return all;
        std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
        return std::max(maxima[count - 1], all);
    }

    static float below(double x) {
        constexpr float all = std::numeric_limits<float>::lowest();
        return x > all ? std::max(all, std::nextafter((float)x, -INFINITY)) : all;
    }

    // The tokens whose logits are not less than `cut`.
    void gather(float cut) {
        ids.clear(), some.clear();
        for (int i = 0; i < vocabulary; i += 16) {
            const f16x x = logit(i);
            if (largest(x) < cut) continue;
            for (int lane = 0; lane < 16; lane++)
                if (x[lane] >= cut) ids.push_back(i + lane), some.push_back(x[lane]);
        }
    }

    void keep(double threshold) {
        size_t count = 0;
        for (int id : ids)
            if (logits[id] >= threshold) ids[count] = id, some[count] = logits[id], count++;
        ids.resize(count), some.resize(count);
    }

    double weight_of_all() const {
        double total = 0, parts[SEARCH];
        for (int i = 0; i < vocabulary; i += SEARCH) {
            const int count = std::min(SEARCH, vocabulary - i);
            weigh(logits + i, count, parts);
            std::fill(parts + count, parts + SEARCH, 0);
            for (int half = SEARCH / 2; half; half /= 2)
                for (int j = 0; j < half; j++) parts[j] += parts[j + half];
            total += parts[0];
        }
        return total;
    }

    // The largest logit such that the tokens that are not below it weigh `top_p` of `total` (if that is negative, of those in `ids`), all of
    // which reach `low`. The smallest logit if rounding leaves the sum of all below that.
    double reached(double top_p, double total, float low) {
        sums.resize(some.size()), wide.assign(some.begin(), some.end());
        weigh(some.data(), some.size(), sums.data());
        const double wanted = top_p * (total < 0 ? weight_above(low) : total);
        float high = INFINITY;
        double before = 0;  // what the tokens from `high` on weigh: less than is wanted
        for (int halvings = 0; some.size() > FEW && halvings < 10; halvings++) {
            const float top = std::min(high, peak), middle = std::max(low / 2 + top / 2, (float)(top - 16 * temperature));
            if (middle <= low || middle >= top) break;
            const double there = weight_above(middle);
            if (there >= wanted) low = middle;
            else high = middle, before = there;
        }
        weighed.clear();
        for (size_t i = 0; i < some.size(); i++)
            if (some[i] >= low && some[i] < high) weighed.push_back({some[i], sums[i]});
        return weighed.empty() ? low : selected(wanted - before);
    }

    double weight_above(double low) const {
        constexpr int LANES = 16;
        double parts[LANES] = {}, total = 0;
        size_t i = 0;
        for (; i + LANES <= wide.size(); i += LANES)
            for (int j = 0; j < LANES; j++) parts[j] += wide[i + j] >= low ? sums[i + j] : 0;
        for (; i < wide.size(); i++) total += wide[i] >= low ? sums[i] : 0;
        for (double part : parts) total += part;
        return total;
    }

    // The largest logit of `weighed` such that those that are not below it weigh `missing`, or else the smallest.
    double selected(double missing) {
        const auto sum = [](auto from, auto to) {
            double all = 0;
            for (; from < to; ++from) all += from->second;
            return all;
        };
        for (auto from = weighed.begin(), to = weighed.end();;) {
            const float a = from->first, b = (from + (to - from) / 2)->first, c = (to - 1)->first;
            const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
            const auto larger = std::partition(from, to, [=](const auto& token) { return token.first > pivot; });
            const auto equal = std::partition(larger, to, [=](const auto& token) { return token.first == pivot; });
            const double above = sum(from, larger), here = above + sum(larger, equal);
            if (above >= missing && larger > from) to = larger;
            else if (here >= missing || equal == to) return pivot;
            else missing -= here, from = equal;
        }
    }

    int64_t drawn_among(double u) {
        sums.resize(ids.size());
        double total = 0;
        weigh(some.data(), some.size(), sums.data());
        for (double& sum : sums) sum = total += sum;
        const size_t place = std::upper_bound(sums.begin(), sums.end(), std::min(u, 1 - 0x1p-52) * total) - sums.begin();
        return ids[std::min(place, ids.size() - 1)];
    }

    // The most probable tokens, of equal ones the smaller first, and their log-probs.
    void list(int wanted, bool filtered, double mass, int32_t* top_ids, double* top_logprobs) {
        std::vector<int32_t> kept;
        if (!filtered) kept.swap(ids), gather(lowest_of(wanted)), kept.swap(ids);
        else kept = ids;
        const auto first = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
        const int count = std::min<int64_t>(wanted, kept.size());
        std::partial_sort(kept.begin(), kept.begin() + count, kept.end(), first);
        for (int i = 0; i < count; i++) top_ids[i] = kept[i], top_logprobs[i] = log_probability(logits[kept[i]], peak, by, mass);
    }
};
