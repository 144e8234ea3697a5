// Intel's matrix instructions (AMX): a product of 16 by 16 by 32 is one of them. float32 takes vector registers.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "tier_avx512_bf16.h"
#undef TIER
#define TIER "AMX"

// Tile loads are opaque to some compilers: what was written before them must really be in memory.
#define VISIBLE() asm volatile("" ::: "memory")

// A process must ask Linux once before it may use tiles (ARCH_REQ_XCOMP_PERM, XTILEDATA).
static inline bool tiles_allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// All tiles are 16 rows of 64 bytes. A constant: some compilers take the instruction for one that reads eight bytes, and leave out
// what the others of a local variable are set to.
static inline void tiles_begin() {
    alignas(64) static constexpr struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}
static inline void tiles_end() { _tile_release(); }

#define PIECE 9

// The processor's own prefetching ends at pages, and begins anew when a few lines of the next one were asked for. One step ahead makes
// it do so: weights came at 33 GB/s for two cores instead of 22, and no faster than 24 from four steps ahead.
static inline void await_step(const bf16* step) {
    UNROLLED for (int i = 0; i < AREA; i += 32) __builtin_prefetch(step + i, 0, 3);
}
// A panel that is read for several blocks of rows leaves time to prefetch the next: into the second-level cache, because its lines
// would wait in the few places of the first that the others need.
static inline void await_lines(const bf16* from, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * 32, 0, 2);
}

// Missing rows are computed too, sixteen at a time, and never read: that costs less than a test.
template <bool ADD>
static inline void multiply(Inputs<bf16> x, Panel<bf16> w, int steps, float* c, size_t ld, int rows) {
    const bool half = rows <= 16;
    const bf16* then = w.then;
    const int lines = w.lines;
    VISIBLE();
    if (ADD) {
        _tile_loadd(0, c, ld * 4);
        _tile_loadd(1, c + 16, ld * 4);
        if (!half) {
            _tile_loadd(2, c + 16 * ld, ld * 4);
            _tile_loadd(3, c + 16 * ld + 16, ld * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    if (half) {
        for (int s = 0; s < steps; s++, x.data += x.step, w.data += w.apart) {
            if (lines) await_lines(then, lines), then += lines * 32;
            else if (then) await_step(s + 1 < steps ? w.data + w.apart : then);
            _tile_loadd(4, x.data, x.row * 2);
            _tile_loadd(6, w.data, w.next * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w.data + w.beside, w.next * 2);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        for (int s = 0; s < steps; s++, x.data += x.step, w.data += w.apart) {
            if (lines) await_lines(then, lines), then += lines * 32;
            else if (then) await_step(s + 1 < steps ? w.data + w.apart : then);
            _tile_loadd(4, x.data, x.row * 2);
            _tile_loadd(6, w.data, w.next * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w.data + w.beside, w.next * 2);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x.data + 16 * x.row, x.row * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, c + 16 * ld, ld * 4);
        _tile_stored(3, c + 16 * ld + 16, ld * 4);
    }
    _tile_stored(0, c, ld * 4);
    _tile_stored(1, c + 16, ld * 4);
    VISIBLE();
}
