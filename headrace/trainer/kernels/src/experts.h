// Mixtures of experts: the router's choice, and the products of each expert with the rows that chose it. The forward pass has the engine's
// order of sums and its roundings (its own is `mixture.h`).
#pragma once
#include "routing.h"
#include "served.h"

// scores [rows, experts] of x [rows, n]. router [experts, n up to 16].
template <class T>
static void router_scores(const T* x, int rows, int n, const float* router, int experts, float* scores) {
    team::each(stretches(rows), [&](int item) {
        float* row = team::room<float>(lanes(n));
        for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++) {
            expand(x + (size_t)r * n, n, row);
            score_experts([&](int c) { return load(row + c); }, router, lanes(n), experts, scores + (size_t)r * experts);
        }
    });
}

// which [rows, chosen], written or, if `recorded`, read; and the weights of these experts.
static void choose(const float* scores, int rows, int experts, int chosen, bool normalise, bool recorded, int64_t* which, float* weights) {
    team::each(stretches(rows), [&](int item) {
        float* row = team::room<float>(experts);
        for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++) {
            std::memcpy(row, scores + (size_t)r * experts, experts * sizeof(float));
            choose_experts(row, experts, chosen, normalise, recorded, which + (size_t)r * chosen, weights + (size_t)r * chosen);
        }
    });
}

struct Mixture {
    int32_t rows, hidden, inner, experts, chosen, gelu;
    int32_t add_gate_up, add_down;     // to the content of the gradient
    const int64_t* which;              // [rows, chosen]
    const float* weights;              // [rows, chosen]
    const void *gate_up, *down;        // [experts, 2 inner, hidden] and [experts, hidden, inner]; bf16 is packed for the pass, matrix by matrix
    void *gate, *up, *y;               // [rows * chosen, inner], sorted by expert: made by the forward pass and read by the backward one
    float *by_gate_up, *by_down;       // gradients, or null
    float* told;                       // [rows * chosen, hidden]: room
};

template <class T>
struct Experts {
    const Mixture& m;
    std::vector<int> place, token, first;  // the place of an assignment among all, sorted by expert; the row at a place; an expert's first place
    std::vector<float> weight;             // at a place

    explicit Experts(const Mixture& m) : m(m), place((size_t)m.rows * m.chosen), token(place.size()), first(m.experts + 1), weight(place.size()) {
        for (size_t i = 0; i < place.size(); i++) first[m.which[i] + 1]++;
        for (int e = 0; e < m.experts; e++) first[e + 1] += first[e];
        std::vector<int> next = first;
        for (size_t i = 0; i < place.size(); i++) {
            const int at = place[i] = next[m.which[i]]++;
            token[at] = i / m.chosen, weight[at] = m.weights[i];
        }
    }

    // out [rows, hidden] of x [rows, hidden].
    void forward(const T* x, float* out) const {
        each_expert([&](int e, size_t at, int rows) {
            static thread_local Arena room;
            if (!rows) return;
            Weight<T> gate = {}, up_ = {}, down = {};
            gate.n = up_.n = m.inner, gate.y = of(m.gate, at), up_.y = of(m.up, at);
            gate.across = packed<true>(0, m.gate_up, 2 * e, m.inner, m.hidden), up_.across = packed<true>(1, m.gate_up, 2 * e + 1, m.inner, m.hidden);
            linear_gated(gathered(x, at, rows, room), rows, m.hidden, gate, up_, of(m.y, at), m.gelu);
            down.n = m.hidden, down.wide = true, down.y = (T*)(m.told + at * m.hidden), down.across = packed<true>(0, m.down, e, m.hidden, m.inner);
            linear(of(m.y, at), rows, m.inner, &down, 1);
        });
        sum_up(m.weights, out);
    }

    // by_x [rows, hidden] and by_weights [rows, chosen], the gradients, from d_out [rows, hidden]; and those of the experts' weights.
    void backward(const T* x, const T* d_out, T* by_x, float* by_weights) const {
        std::vector<float> by_weight(place.size());
        each_expert([&](int e, size_t at, int rows) { backward_of(e, at, rows, x, d_out, by_weight.data() + at); });
        for (size_t i = 0; i < place.size(); i++) by_weights[i] = by_weight[place[i]];
        sum_up(std::vector<float>(place.size(), 1.f).data(), by_x);
    }

   private:
    // One after the other, or, where there are many, each by one thread: few rows of one are no work for several.
    template <class F>
    void each_expert(const F& f) const {
        const auto one = [&](int e) { f(e, (size_t)first[e], first[e + 1] - first[e]); };
        if (m.experts >= 4 * team::members->size) return team::each(m.experts, one);
        for (int e = 0; e < m.experts; e++) one(e);
    }

    T* of(void* kept, size_t at) const { return (T*)kept + at * m.inner; }

    const T* gathered(const T* from, size_t at, int rows, Arena& room) const {
        room.grow((size_t)rows * m.hidden * sizeof(T));
        T* to = (T*)room.data;
        team::each(stretches(rows), [&](int item) {
            for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++)
                std::memcpy(to + (size_t)r * m.hidden, from + (size_t)token[at + r] * m.hidden, m.hidden * sizeof(T));
        });
        return to;
    }

    // Matrix [n, k] number `index` of a stack. In float32 it is packed here, into one of this thread's rooms.
    template <bool ACROSS>
    static const T* packed(int which, const void* stack, int index, int n, int k) {
        const size_t size = (size_t)up(n) * up(k) * AREA;
        if constexpr (std::is_same<T, bf16>::value) return (const T*)stack + index * size;
        else {
            static thread_local Arena rooms[2];
            rooms[which].grow(size * sizeof(T));
            T* to = (T*)rooms[which].data;
            pack_weight((const float*)stack + (size_t)index * n * k, n, k, ACROSS ? to : nullptr, ACROSS ? nullptr : to);
            return to;
        }
    }

    // to [rows, hidden]: the sum of what a row's experts told, by their weights [rows, chosen].
    template <class D>
    void sum_up(const float* weights, D* to) const {
        team::each(stretches(m.rows), [&](int item) {
            for (int row = item * STRETCH; row < std::min(m.rows, (item + 1) * STRETCH); row++)
                for (int c = 0; c < m.hidden; c += 16) {
                    const int n = std::min(16, m.hidden - c), *places = &place[(size_t)row * m.chosen];
                    const auto told = [&](int i) { return Gated<float>::some(m.told + (size_t)places[i] * m.hidden + c, n); };
                    Gated<D>::keep(to + (size_t)row * m.hidden + c, weighed(told, weights + (size_t)row * m.chosen, m.chosen), n);
                }
        });
    }

    // The product by `down` runs before the weights of the choice: then it gives their gradient too, without what the experts told.
    void backward_of(int e, size_t at, int rows, const T* x, const T* d_out, float* by_weight) const {
        static thread_local Arena rooms[3], wide, low, packing;
        const T *from = gathered(x, at, rows, rooms[0]), *slope = gathered(d_out, at, rows, rooms[1]);
        const size_t count = (size_t)rows * m.inner;
        low.grow(4 * count * sizeof(T)), wide.grow(count * sizeof(float));
        T *dy = (T*)low.data, *scaled = dy + count, *d_gate = scaled + count, *d_up = d_gate + count;
        Weight<T> down = {}, both[2] = {};
        down.n = m.hidden, down.y = (T*)slope, down.gradient = m.by_down ? m.by_down + (size_t)e * m.hidden * m.inner : nullptr, down.add = m.add_down;
        for (int i = 0; i < 2; i++) {
            both[i].n = m.inner, both[i].y = i ? d_up : d_gate, both[i].add = m.add_gate_up;
            both[i].gradient = m.by_gate_up ? m.by_gate_up + (size_t)(2 * e + i) * m.inner * m.hidden : nullptr;
        }
        if (rows) {
            down.down = packed<false>(0, m.down, e, m.hidden, m.inner);
            linear_input_gradient((float*)wide.data, rows, m.inner, &down, 1);
            through_choice(at, rows, (const float*)wide.data, dy, scaled, by_weight);
            Gated<T>{(int64_t)count, (bool)m.gelu}.backward(of(m.gate, at), of(m.up, at), dy, d_gate, d_up);
            for (int i = 0; i < 2; i++) both[i].down = packed<false>(i, m.gate_up, 2 * e + i, m.inner, m.hidden);
            linear_input_gradient(m.told + at * m.hidden, rows, m.hidden, both, 2);
        }
        packing.grow(std::max(room_of<T>(rows, m.inner, m.hidden), room_of<T>(rows, m.hidden, m.inner)) * sizeof(T));
        if (m.by_down) linear_weight_gradient(scaled, rows, m.inner, &down, 1, (T*)packing.data);
        if (m.by_gate_up) linear_weight_gradient(from, rows, m.hidden, both, 2, (T*)packing.data);
    }

    // From the gradient of an expert's y without its weight: those of the weight and of y, and y by the weight.
    void through_choice(size_t at, int rows, const float* unweighted, T* dy, T* scaled, float* by_weight) const {
        const int n = m.inner;
        team::each(stretches(rows), [&](int item) {
            float *d = team::room<float>(2 * lanes(n)), *y = d + lanes(n);
            for (int r = item * STRETCH; r < std::min(rows, (item + 1) * STRETCH); r++) {
                expand(unweighted + (size_t)r * n, n, d);
                expand(of(m.y, at + r), n, y);
                by_weight[r] = dot(d, y, n);
                for (int c = 0; c < lanes(n); c += 16) store(d + c, load(d + c) * weight[at + r]), store(y + c, load(y + c) * weight[at + r]);
                shrink(d, n, dy + (size_t)r * n), shrink(y, n, scaled + (size_t)r * n);
            }
        });
    }
};
