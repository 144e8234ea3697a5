// NEON, as every 64-bit ARM has it: 32 registers of four floats.
#pragma once

#define TIER "NEON"
typedef float fvec __attribute__((vector_size(16), aligned(4)));
constexpr int TALL = 6, ACROSS = 4;  // 24 sums, 4 weights and inputs
constexpr bool PAIRS = false;
#include "tile.h"
