// Finds the values that differ between two images of a packed buffer, and puts them back. Exact for any bits: values are
// compared as integers, never as numbers.
//
// A change is a gap (the number of equal values before it) and the exclusive or of its old and new value. Gaps are bytes:
// 255 stands for 255 equal values without a change behind them. The bytes of the differences lie in one plane each, because
// the high bytes of small changes are nearly all zero.
#include <cstdint>
#include <cstring>

namespace {

template <class T>
struct Found {
    uint8_t* gaps;
    uint8_t* const* planes;
    int64_t bytes = 0, count = 0, behind = 0;  // behind: the place after the last change

    void put(int64_t at, T difference) {
        int64_t gap = at - behind;
        for (; gap >= 255; gap -= 255) gaps[bytes++] = 255;
        gaps[bytes++] = uint8_t(gap);
        for (size_t plane = 0; plane < sizeof(T); plane++) planes[plane][count] = uint8_t(difference >> (8 * plane));
        count++;
        behind = at + 1;
    }
};

template <class T>
int64_t find(const T* before, const T* now, int64_t n, uint8_t* gaps, int64_t* bytes, uint8_t* const* planes) {
    constexpr int words = 8, lanes = 8 / sizeof(T), step = words * lanes;  // one cache line
    Found<T> found{gaps, planes};
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        uint64_t a[words], b[words], any = 0;
        std::memcpy(a, before + i, sizeof a);
        std::memcpy(b, now + i, sizeof b);
        for (int k = 0; k < words; k++) any |= a[k] ^= b[k];
        if (!any) continue;
        for (int k = 0; k < words; k++)
            for (uint64_t rest = a[k]; rest;) {
                const int lane = __builtin_ctzll(rest) / (8 * sizeof(T));
                const T difference = T(a[k] >> (8 * sizeof(T) * lane));
                found.put(i + k * lanes + lane, difference);
                rest &= ~(uint64_t(T(~T(0))) << (8 * sizeof(T) * lane));
            }
    }
    for (; i < n; i++)
        if (const T difference = T(before[i] ^ now[i])) found.put(i, difference);
    *bytes = found.bytes;
    return found.count;
}

template <class T>
int apply(T* image, int64_t n, const uint8_t* gaps, int64_t bytes, const uint8_t* const* planes, int64_t count) {
    int64_t at = 0, done = 0;
    for (int64_t g = 0; g < bytes; g++) {
        at += gaps[g];
        if (gaps[g] == 255) continue;
        if (at >= n || done >= count) return 1;
        T difference = 0;
        for (size_t plane = 0; plane < sizeof(T); plane++) difference |= T(T(planes[plane][done]) << (8 * plane));
        image[at++] ^= difference;
        done++;
    }
    return done != count;
}

}  // namespace

extern "C" {

// Returns the number of changes. `gaps` and every plane have room for n bytes; `width`: bytes of a value, 2 or 4.
int64_t headrace_delta_find(int width, const void* before, const void* now, int64_t n, uint8_t* gaps, int64_t* bytes,
                            uint8_t* const* planes) {
    return width == 2 ? find((const uint16_t*)before, (const uint16_t*)now, n, gaps, bytes, planes)
                      : find((const uint32_t*)before, (const uint32_t*)now, n, gaps, bytes, planes);
}

// Returns 0, or 1 where the changes do not fit into n values; the image is then spoilt.
int headrace_delta_apply(int width, void* image, int64_t n, const uint8_t* gaps, int64_t bytes,
                         const uint8_t* const* planes, int64_t count) {
    return width == 2 ? apply((uint16_t*)image, n, gaps, bytes, planes, count)
                      : apply((uint32_t*)image, n, gaps, bytes, planes, count);
}
}
