// Weights of eight bits: codes in the panels of product.h, and a scale for each output.
#pragma once
#include "decoder.h"

typedef uint8_t u8x16 __attribute__((vector_size(16)));

// Exchanges rows and columns of 16 by 16 bytes: four times, neighbours are those that were eight apart.
static inline void mix(const u8x16* rows, u8x16* mixed) {
    const u8x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
        mixed[2 * i] = __builtin_shuffle(rows[i], rows[i + 8], low), mixed[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 8], high);
}
static inline void transpose(u8x16* rows) {
    u8x16 other[16];
    mix(rows, other), mix(other, rows), mix(rows, other), mix(other, rows);
}

// The bits of a number without its sign: they ascend with its size, and those of what is no finite number are the largest.
INLINED i16x size_bits(f16x v) { return (i16x)((u16x)v & 0x7fffffffu); }

// Quantises one panel: a code is the weight times levels / the output's largest, rounded to the nearest integer, to even between two. (Where the
// processor has no FMA the product is rounded before.) An output that has a weight which is no finite number gets a scale that is none.
// PAIRED: codes lie in pairs of inputs, as product.h has them for rows of bf16.
template <bool PAIRED = sizeof(taken) == sizeof(bf16)>
static inline void quantise_panel(const stored* w, const int32_t* rows, const Linear& into, int panel, int levels) {
    constexpr float LEAST = 1e-30f;  // of the largest weight: `levels` over less could overflow
    const f16x magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, to nearest even
    const int k = into.k, whole = k / 16 * 16;
    const stored* from[SIDE];
    float by[SIDE];
    for (int j = 0; j < SIDE; j++) {
        const int output = panel * SIDE + j, row = output < into.n ? rows[output] : -1;
        from[j] = row < 0 ? nullptr : w + (size_t)row * k;
        i16x most = {};
        for (int i = 0; from[j] && i < k; i += 16) {
            stored part[16] = {};
            if (i >= whole) std::memcpy(part, from[j] + i, (k - i) * sizeof(stored));
            const i16x size = size_bits(read(i < whole ? from[j] + i : part));
            most = select(size > most, size, most);
        }
        const f16x sizes = (f16x)most;
        float peak = 0;
        for (int i = 0; i < 16; i++) peak = peak != peak || sizes[i] < peak ? peak : sizes[i];  // NaN stays
        by[j] = peak > LEAST ? levels / peak : 0;
        into.scales[panel * SIDE + j] = peak <= LEAST ? 0 : peak / levels;
    }
    for (int step = 0; step < up(k); step++)
        for (int half = 0; half < 2; half++)
            for (int first = step * SIDE; first < (step + 1) * SIDE; first += 16) {
                u8x16 tile[16] = {};  // outputs, of 16 inputs each
                for (int j = 0; j < 16; j++) {
                    const stored* row = from[half * 16 + j];
                    stored part[16] = {};
                    if (!row || first >= k) continue;
                    if (first >= whole) std::memcpy(part, row + first, (k - first) * sizeof(stored));
                    const f16x v = read(first < whole ? row + first : part) * by[half * 16 + j] + magic;
                    keep_codes((code*)(tile + j), (i16x)v - (i16x)magic);
                }
                transpose(tile);
                code* to = into.codes + ((size_t)panel * up(k) + step) * AREA + half * 512 + first % SIDE * 16;
                if (PAIRED)
                    for (int i = 0; i < 16; i += 2) {
                        const u8x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
                        const u8x16 both[2] = {__builtin_shuffle(tile[i], tile[i + 1], low), __builtin_shuffle(tile[i], tile[i + 1], low + 8)};
                        std::memcpy(tile + i, both, sizeof both);
                    }
                std::memcpy(to, tile, sizeof tile);
            }
}
