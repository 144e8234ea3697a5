// Intel's matrix instructions (AMX): asking for them, and setting the tiles up. Nothing where there are none.
#pragma once
#include "vec.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// Tile loads are opaque to some compilers: what was written before them must really be in memory.
#define VISIBLE() asm volatile("" ::: "memory")

// Linux must be asked once a process before tiles may be used (ARCH_REQ_XCOMP_PERM, XTILEDATA).
static inline bool tiles_allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// All tiles are 16 rows of 64 bytes.
static inline void tiles_begin() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}
static inline void tiles_end() { _tile_release(); }
#endif
