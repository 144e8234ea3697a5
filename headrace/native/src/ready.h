// The state that a thread needs to compute: made when it joins, destroyed when it leaves.
#pragma once
#include "product.h"

struct Ready {
    NoDenormals flushed;
    Ready() { tiles_begin(); }
    ~Ready() { tiles_end(); }
};
