// Blocks of 32 by 32 of bf16 or float32: cut out of matrices, transposed, and packed as the second operand of product.h.
#pragma once
#include "product.h"

// [rows, columns] of a matrix as a full block, padded with zeros.
template <class S, class T>
static inline void cut(const S* from, size_t ld, int rows, int columns, T* block, size_t to_ld) {
    for (int r = 0; r < SIDE; r++, block += to_ld)
        for (int c = 0; c < SIDE; c += 16) {
            if (r < rows && c + 16 <= columns) write(block + c, read(from + r * ld + c));
            else
                for (int i = c; i < c + 16; i++) write1(block + i, r < rows && i < columns ? read1(from + r * ld + i) : 0.f);
        }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Rows i and i + 4 lie in one register, so that the shuffles, which stay within half a register, see whole columns.
static inline void transpose8(const float* from, size_t ld, float* to, size_t to_ld) {
    __m256 row[8], mixed[8];
    for (int i = 0; i < 8; i++) {
        const float* half = from + i % 4 * ld + i / 4 * 4;
        row[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(half)), _mm_loadu_ps(half + 4 * ld), 1);
    }
    for (int i = 0; i < 8; i += 2) mixed[i] = _mm256_unpacklo_ps(row[i], row[i + 1]), mixed[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    for (int half = 0; half < 8; half += 4)
        for (int i = 0; i < 2; i++) {
            float* column = to + (half + i * 2) * to_ld;
            _mm256_storeu_ps(column, _mm256_shuffle_ps(mixed[half + i], mixed[half + i + 2], 0x44));
            _mm256_storeu_ps(column + to_ld, _mm256_shuffle_ps(mixed[half + i], mixed[half + i + 2], 0xee));
        }
}
#endif

static inline void transpose16(const uint32_t* from, size_t ld, uint32_t* to, size_t to_ld) {
#if defined(__AVX512F__)
    __m512i v[16], w[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(from + i * ld);
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int s = 1; s < 16; s *= 2) {  // rows i and i + s swap the lanes in which their indices differ
        const __m512i far = _mm512_set1_epi32(s), bit = _mm512_and_epi32(lane, far);
        const __mmask16 high = _mm512_test_epi32_mask(bit, bit);
        const __m512i down = _mm512_add_epi32(_mm512_sub_epi32(lane, far), _mm512_set1_epi32(16)), above = _mm512_add_epi32(lane, far);
        const __m512i low = _mm512_mask_blend_epi32(high, lane, down);
        const __m512i top = _mm512_mask_blend_epi32(high, above, _mm512_add_epi32(lane, _mm512_set1_epi32(16)));
        for (int i = 0; i < 16; i++)
            if (!(i & s)) {
                w[i] = _mm512_permutex2var_epi32(v[i], low, v[i + s]);
                w[i + s] = _mm512_permutex2var_epi32(v[i], top, v[i + s]);
            }
        for (int i = 0; i < 16; i++) v[i] = w[i];
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_ld, v[i]);
#elif defined(__AVX2__)
    for (int r = 0; r < 16; r += 8)
        for (int c = 0; c < 16; c += 8) transpose8((const float*)from + r * ld + c, ld, (float*)to + c * to_ld + r, to_ld);
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j * to_ld + i] = from[i * ld + j];
#endif
}

// One step of a panel from a full block whose rows run along the sum.
static inline void pack_down(const float* block, size_t ld, float* step) {
    for (int r = 0; r < SIDE; r++)
        for (int c = 0; c < SIDE; c += 16) store(step + r * SIDE + c, load(block + r * ld + c));
}
static inline void pack_down(const bf16* block, size_t ld, bf16* step) {
    for (int pair = 0; pair < 16; pair++)
        for (int tile = 0; tile < 2; tile++) {
            const bf16 *even = block + 2 * pair * ld + tile * 16, *odd = even + ld;
            store((float*)(step + tile * 512 + pair * 32), (f16x)(bits_of(even) | bits_of(odd) << 16));
        }
}

// One step of a panel from a full block whose columns run along the sum.
static inline void pack_across(const float* block, size_t ld, float* step) {
    for (int r = 0; r < SIDE; r += 16)
        for (int c = 0; c < SIDE; c += 16) transpose16((const uint32_t*)block + r * ld + c, ld, (uint32_t*)step + c * SIDE + r, SIDE);
}
static inline void pack_across(const bf16* block, size_t ld, bf16* step) {
    for (int tile = 0; tile < 2; tile++) transpose16((const uint32_t*)(block + tile * 16 * ld), ld / 2, (uint32_t*)(step + tile * 512), 16);
}

// The transpose of a full block, as rows.
static inline void turn(const float* block, size_t ld, float* to, size_t to_ld) {
    for (int r = 0; r < SIDE; r += 16)
        for (int c = 0; c < SIDE; c += 16) transpose16((const uint32_t*)block + r * ld + c, ld, (uint32_t*)to + c * to_ld + r, to_ld);
}
static inline void turn(const bf16* block, size_t ld, bf16* to, size_t to_ld) {
    alignas(64) bf16 pairs[AREA];
    pack_down(block, ld, pairs);  // [tile][pair of rows][16 columns][2]: as 32-bit numbers, pairs and columns change places
    for (int tile = 0; tile < 2; tile++)
        transpose16((const uint32_t*)(pairs + tile * 512), 16, (uint32_t*)(to + tile * 16 * to_ld), to_ld / 2);
}

// c [32, 32] = a [32, steps * 32], rows as they lie in memory, times a panel whose steps are `apart` elements apart, added to c
// if ADD.
template <bool ADD, class T>
static inline void multiply(const T* a, size_t lda, const T* b, size_t apart, int steps, float* c, size_t ldc) {
    multiply<ADD>(Inputs<T>{a, lda, SIDE}, Panel<T>{b, apart}, steps, c, ldc, SIDE);
}

// c [32, 32] += the transpose of a [depth, 32] times b [depth, 32], whose rows lie one after the other.
static inline void multiply_turned(const float* a, const float* b, int depth, float* c, size_t ldc) {
    for (int column = 0; column < SIDE; column += ACROSS * LANES)
        for (int tiles = tiles_of(SIDE), from = 0, high; tiles; tiles--, from += high) {
            high = (SIDE - from + tiles - 1) / tiles;
            at_most<TALL>(high, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                float* to = c + from * ldc + column;
                Sums<R> sums;
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] = *(fvec*)(to + r * ldc + v * LANES);
                const float *x = a + from, *w = b + column;
                for (int i = 0; i < depth; i++, x += SIDE, w += SIDE) {
                    fvec weight[ACROSS];
                    UNROLLED for (int v = 0; v < ACROSS; v++) weight[v] = *(const fvec*)(w + v * LANES);
                    UNROLLED for (int r = 0; r < R; r++)
                        UNROLLED for (int v = 0; v < ACROSS; v++) sums.at[r][v] += weight[v] * x[r];
                }
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int v = 0; v < ACROSS; v++) *(fvec*)(to + r * ldc + v * LANES) = sums.at[r][v];
            });
        }
}
