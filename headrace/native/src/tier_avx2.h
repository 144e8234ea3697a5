// AVX2 and FMA: 16 registers of eight floats.
#pragma once

#define TIER "AVX2"
typedef float fvec __attribute__((vector_size(32), aligned(4)));
constexpr int TALL = 6, ACROSS = 2;  // 12 sums, 2 weights and an input
constexpr bool PAIRS = false;
#include "tile.h"
