// Loops distributed over a team of threads. Autograd calls one operation after the other, so each loop is a run of its own.
#pragma once
#include <mutex>

#include "ready.h"
#include "team.h"
#include "tiles.h"

namespace team {
static std::mutex one_loop;  // Python may call from several threads
static Team<Ready>* members = nullptr;

static void use_threads(int threads) {
    std::lock_guard<std::mutex> hold(one_loop);
    if (members && members->size == threads) return;
    delete members;
    members = new Team<Ready>(threads);  // never deleted at the process's end: its threads are asleep
}

static thread_local bool within = false;  // an item of a loop

// f(i) for all i in [0, n), each by one thread. An item's result must not depend on which threads do the others. A loop within an item
// is done by the thread that has it.
template <class F>
void each(int n, const F& f) {
    if (within) {
        for (int i = 0; i < n; i++) f(i);
        return;
    }
    const Phase all = Phase::of(n, [&](int i, int) {
        within = true;
        f(i);
        within = false;
    });
    std::lock_guard<std::mutex> hold(one_loop);
    members->run(&all, 1);
}

// A buffer that a thread keeps from one loop to the next; `which` distinguishes several.
template <class T>
static inline T* room(size_t count, int which = 0) {
    static thread_local std::vector<char> kept[12];
    auto& mine = kept[which];
    size_t bytes = count * sizeof(T) + 64;
    if (mine.size() < bytes) mine.resize(bytes);
    return (T*)(((uintptr_t)mine.data() + 63) / 64 * 64);
}
}  // namespace team
