// Threads that process a list of phases together. A phase ends when all of its items are done, by any thread.
//
// There is no barrier: a phase waits for items, never for threads. A thread takes some items of the phase that is open, and the
// one that finishes the last of them opens the next phase. So a thread that the system keeps from running delays the others by
// the few items it holds at most and joins whatever phase is open when it runs again; one that holds none delays nobody.
// Results do not depend on which thread does what, as long as no item depends on the thread of another.
//
// A thread that finds nothing to take spins briefly and then sleeps. Its core becomes idle, and the system moves a thread there
// that waits for another core: often the one with the missing items. A thread that yields in a loop keeps the core for itself.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bell.h"

struct Phase {
    int n;
    std::function<void(int, int, int)> work;  // on item i, i + by, ..., `count` of them; by: 1 or -1

    // f(i, the item that this thread probably does next) for all i in [0, n), in any order, by any thread.
    template <class F>
    static Phase of(int n, F f) {
        return {n, [f](int i, int by, int count) {
                    for (; count; count--, i += by) f(i, i + by);
                }};
    }
};

// Phases in their order, all listed before the first begins.
struct Plan {
    std::vector<Phase> phases;

    // f(i), or f(i, probably the next), for all i in [0, n), in any order, by any thread. f is copied, so what it refers to must
    // outlive the run.
    template <class F>
    void each(int n, F f) {
        if constexpr (std::is_invocable<F, int, int>::value) phases.push_back(Phase::of(n, f));
        else phases.push_back(Phase::of(n, [f](int i, int) { f(i); }));
    }
};

// `Ready`: made by a thread before the first items it takes, and destroyed before it sleeps for long.
template <class Ready>
class Team {
   public:
    explicit Team(int threads) : size(threads), places(new Place[threads]) {
        for (int i = 1; i < threads; i++) workers.emplace_back([this, i] { serve(i); });
    }
    Team(const Team&) = delete;
    ~Team() {
        leaving = true;
        bell.number++;
        bell.ring(size);
        for (auto& worker : workers) worker.join();
    }

    // The calling thread works too, and does everything if no other thread gets to run. One call at a time.
    void run(const Phase* plan, int count) {
        std::optional<Ready> ready;
        phases = plan, first = number_of(open) + 1, end = first + count;
        open_next(first - 1, 0, ready);
        while (open != all_done(end))
            if (!take(0, ready)) rest(0, ready);
    }

    const int size;

   private:
    struct alignas(64) Place {  // the core on which a thread took the items that it holds
        std::atomic<uint32_t> phase{0};
        std::atomic<int> core{-1};
    };

    void serve(int me) {
        std::optional<Ready> ready;
        while (!leaving)
            if (!take(me, ready)) rest(me, ready);
    }

    // `open`: the number of a phase, and the range of its items that no thread has taken, each of which stands for `grain` of them
    // where there are very many.
    static constexpr int MOST = 0xffff;
    static int grain(const Phase& phase) { return 1 + (phase.n - 1) / MOST; }
    static uint32_t number_of(uint64_t state) { return state >> 32; }
    static uint32_t begin_of(uint64_t state) { return state & MOST; }
    static uint32_t end_of(uint64_t state) { return state >> 16 & MOST; }
    static uint32_t left_of(uint64_t state) { return end_of(state) - begin_of(state); }
    static uint64_t all_done(uint32_t number) { return (uint64_t)number << 32; }
    static uint64_t all_left(uint32_t number, int count) { return all_done(number) | (uint64_t)count << 16; }

    // Takes some of the open phase's items and does them. False if there are none to take. Every second thread takes from the end and
    // goes down: of two threads, each knows what it does next, and can have it prefetched.
    bool take(int me, std::optional<Ready>& ready) {
        const bool down = me % 2;
        uint64_t state = open.load(std::memory_order_acquire), taken;
        uint32_t some;
        do {
            if (!left_of(state)) return false;
            some = std::max(1u, left_of(state) / (size * PARTS));
            taken = down ? state - ((uint64_t)some << 16) : state + some;
        } while (!open.compare_exchange_weak(state, taken, std::memory_order_acq_rel, std::memory_order_acquire));
        // From here on the phase cannot end before these items are done, so all that it refers to exists.
        if (!ready) ready.emplace();
        const uint32_t number = number_of(state);
        const Phase& phase = phases[number - first];
        const int each = grain(phase);
        const int from = (int)(down ? end_of(taken) : begin_of(state)) * each, to = std::min(from + (int)some * each, phase.n);
        places[me].core.store(core(), std::memory_order_relaxed);
        places[me].phase.store(number, std::memory_order_relaxed);
        phase.work(down ? to - 1 : from, down ? -1 : 1, to - from);
        places[me].phase.store(0, std::memory_order_relaxed);
        if (unfinished.fetch_sub((int)some, std::memory_order_acq_rel) == (int)some) open_next(number, me, ready);
        return true;
    }

    // Phase `number` is done. A phase of a single item is done here: no other thread could help.
    void open_next(uint32_t number, int me, std::optional<Ready>& ready) {
        while (++number != end) {
            const Phase& phase = phases[number - first];
            const int n = phase.n;  // once the phase is open, others may end it and all that follow
            if (n == 1) {
                if (!ready) ready.emplace();
                phase.work(0, 1, 1);
            }
            if (n <= 1) continue;
            const int count = (n - 1) / grain(phase) + 1;
            unfinished.store(count, std::memory_order_relaxed);
            open.store(all_left(number, count), std::memory_order_release);
            bell.number++;  // not `number`: this thread may be late, and others may have rung for later phases
            return bell.ring(count - 1);
        }
        open.store(all_done(number), std::memory_order_release);
        bell.number++;
        if (me) bell.ring(size);  // the caller of `run` may be asleep
    }

    // Waits until another phase is open, or for a while.
    void rest(int me, std::optional<Ready>& ready) {
        const uint32_t heard = bell.number;  // first: a thread that opens a phase after `open` was read rings after this
        const uint64_t state = open.load(std::memory_order_acquire);
        if (left_of(state) || (!me && state == all_done(end))) return;
        if (worth_spinning(me, number_of(state)) && spin(state)) return;
        if (me) ready.reset();
        if (!leaving) bell.sleep_while(heard);
    }

    bool spin(uint64_t state) const {
        const auto until = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < 16; i++, relax())
                if (open.load(std::memory_order_acquire) != state) return true;
        } while (std::chrono::steady_clock::now() < until);
        return false;
    }

    // False if a thread took the missing items on this very core: it cannot do them before this one leaves.
    bool worth_spinning(int me, uint32_t number) const {
        const int here = core();
        for (int i = 0; here >= 0 && i < size; i++)
            if (i != me && places[i].phase.load(std::memory_order_relaxed) == number && places[i].core.load(std::memory_order_relaxed) == here)
                return false;
        return true;
    }

    static int core() {
#if defined(__linux__)
        return sched_getcpu();
#else
        return -1;
#endif
    }
    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    static constexpr int PARTS = 8;  // a thread's turns at what is left: the first are long reads of memory, the last even out
    static constexpr std::chrono::microseconds SPIN{50};

    std::unique_ptr<Place[]> places;
    std::vector<std::thread> workers;
    const Phase* phases = nullptr;  // of the run in progress
    uint32_t first = 0, end = 0;    // the number of its first phase, and one more than that of its last
    std::atomic<bool> leaving{false};
    alignas(64) std::atomic<uint64_t> open{0};  // see `begin_of`
    Bell bell;                                  // rings when another phase is open, and at the end
    alignas(64) std::atomic<int> unfinished{0};
};
