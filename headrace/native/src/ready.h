// What a thread needs before it computes: made when it joins, destroyed when it leaves.
#pragma once
#include "product.h"

struct Ready {
    NoDenormals flushed;
    Ready() { tiles_begin(); }
    ~Ready() { tiles_end(); }
};
