// AVX-512 without bf16: 32 registers of sixteen floats.
#pragma once

#define TIER "AVX-512"
typedef float fvec __attribute__((vector_size(64), aligned(4)));
constexpr int TALL = 12, ACROSS = 2;  // 24 sums, 2 weights and an input
constexpr bool PAIRS = false;
#include "tile.h"
