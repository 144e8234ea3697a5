// Loops shared out among the threads that torch already has.
//
// A second pool would fight with torch's, whose threads spin for a while after each operator. So the caller hands over the
// function by which torch's own OpenMP runtime starts a parallel region; without it threads are started for each loop.
#pragma once
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "tiles.h"

namespace team {
using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);
static Start start = nullptr;
static int threads = 1;

template <class F>
struct Job {
    const F& f;
    int n, stride;
    std::atomic<int> next{0};

    static void serve(void* data) {
        Job& job = *(Job*)data;
        NoDenormals flushed;
        tiles_begin();
        for (int first = job.next.fetch_add(job.stride); first < job.n; first = job.next.fetch_add(job.stride))
            for (int i = first; i < std::min(job.n, first + job.stride); i++) job.f(i);
        tiles_end();
    }
};

// f(i) for all i in [0, n), each by one thread. What a thread does must not depend on who does the rest.
template <class F>
void each(int n, const F& f) {
    Job<F> job{f, n, std::max(1, n / (threads * 8))};
    int size = std::min(threads, n);
    if (size <= 1) return Job<F>::serve(&job);
    if (start) return start(&Job<F>::serve, &job, size, 0);
    std::vector<std::thread> others;
    for (int i = 1; i < size; i++) others.emplace_back(&Job<F>::serve, &job);
    Job<F>::serve(&job);
    for (auto& other : others) other.join();
}

// Room that a thread keeps from one loop to the next; `which` tells several apart.
template <class T>
static inline T* room(size_t count, int which = 0) {
    static thread_local std::vector<char> kept[12];
    auto& mine = kept[which];
    size_t bytes = count * sizeof(T) + 64;
    if (mine.size() < bytes) mine.resize(bytes);
    return (T*)(((uintptr_t)mine.data() + 63) / 64 * 64);
}
}  // namespace team
