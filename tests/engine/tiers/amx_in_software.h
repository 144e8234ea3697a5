// The tile instructions that tier_amx.h uses, computed in software, so that its addresses can be checked on any processor with
// AVX-512. The order of the two products of a pair is Intel's: the even one first (Intel 64 and IA-32 Architectures Software
// Developer's Manual, TDPBF16PS).
#pragma once
#include <immintrin.h>

#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

static char software_tiles[8][16][64];

static void software_loadconfig(const void*) {}
static void software_release() {}
static void software_zero(int tile) { std::memset(software_tiles[tile], 0, 1024); }
static void software_loadd(int tile, const void* from, size_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy(software_tiles[tile][r], (const char*)from + r * stride, 64);
}
static void software_stored(int tile, void* to, size_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy((char*)to + r * stride, software_tiles[tile][r], 64);
}
static void software_dpbf16ps(int sum, int left, int right) {
    auto number = [](const char* at) {
        unsigned short half;
        std::memcpy(&half, at, 2);
        unsigned bits = (unsigned)half << 16;
        float wide;
        return std::memcpy(&wide, &bits, 4), wide;
    };
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) {
            float total;
            std::memcpy(&total, software_tiles[sum][r] + 4 * c, 4);
            for (int k = 0; k < 32; k++) total += number(software_tiles[left][r] + 2 * k) * number(software_tiles[right][k / 2] + 4 * c + k % 2 * 2);
            std::memcpy(software_tiles[sum][r] + 4 * c, &total, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig software_loadconfig
#define _tile_release software_release
#define _tile_zero software_zero
#define _tile_loadd software_loadd
#define _tile_stored software_stored
#define _tile_dpbf16ps software_dpbf16ps
