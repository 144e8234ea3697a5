// Gated short convolutions (LFM2): the projection gives a factor of the input, one of the result, and the input, which is convolved over the last few
// tokens, number by number of the hidden state.
//
// What a token brings to them is kept in its block, beside keys and values, as these are: for every token, though the next token needs the last few
// alone. So a sequence is shared, forked, moved and cut wherever keys and values are, and nothing is computed again.
#pragma once
#include "heads.h"

struct Convolutions : Heads {
    using Heads::Heads;

    void convolve(const Pass& p, int index, const Layer& l) {
        plan.each(p.tokens_count, [=, &p](int row) {
            stored* to = input(p, index, segment[row], position[row]);
            for (int c = 0; c < m.hidden; c += 16) write(to + c, load(qkv.at(row, c)) * load(qkv.at(row, 2 * m.hidden + c)));
        });
        plan.each(p.tokens_count, [=, &p, &l](int row) {
            const stored* from[MOST_TOKENS];
            const int first = std::max(0, l.kernel - 1 - position[row]);  // before the beginning there is nothing
            for (int k = first; k < l.kernel; k++) from[k] = input(p, index, segment[row], position[row] - l.kernel + 1 + k);
            for (int c = 0; c < m.hidden; c += 16) {
                f16x sum = l.convolution_bias ? load(l.convolution_bias + c) : f16x{};
                for (int k = first; k < l.kernel; k++) sum += read(from[k] + c) * load(l.convolution + (size_t)k * up(m.hidden) * SIDE + c);
                write(mixed.at(row, c), sum * load(qkv.at(row, m.hidden + c)));
            }
        });
    }

    static constexpr int MOST_TOKENS = 16;
};
