// Any processor: four floats at a time are what nearly all have, and the compiler splits them where one does not.
#pragma once

#define TIER "portable"
typedef float fvec __attribute__((vector_size(16), aligned(4)));
constexpr int TALL = 4, ACROSS = 2;
constexpr bool PAIRS = false;
#include "tile.h"
