// A team of threads that runs one function together, phase by phase.
//
// torch's own OpenMP pool would fork and join once per operator; here a whole forward pass is one job, and phases are kept
// apart by a barrier that spins briefly and then yields, so that a trainer on the same cores is not starved.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() ((void)0)
#endif

struct Team {
    explicit Team(int threads) : size(threads) {
        for (int i = 1; i < threads; i++) workers.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> hold(lock);
            leaving = true;
            job_number++;
        }
        wake.notify_all();
        for (auto& worker : workers) worker.join();
    }

    // Runs `work` in every thread, the calling one included. What it says in `each` happens in the order it says it.
    void run(const std::function<void()>& work) {
        {
            std::lock_guard<std::mutex> hold(lock);
            job = &work;
            job_number++;
        }
        wake.notify_all();
        work();
        barrier();
    }

    // Inside a job: f(i) for all i in [0, n), each by one thread; nobody goes on before all are done. A thread takes several
    // neighbours at once, which mostly lie behind one another in memory, but leaves enough to even out what others lose.
    template <class F>
    void each(int n, const F& f) {
        const int stride = std::max(1, n / (size * 6));
        for (int first = next.fetch_add(stride); first < n; first = next.fetch_add(stride))
            for (int i = first; i < std::min(n, first + stride); i++) f(i);
        barrier();
    }

    void barrier() {
        int round = generation.load();
        if (arrived.fetch_add(1) + 1 == size) {
            arrived = 0;
            next = 0;
            generation = round + 1;
            return;
        }
        for (int i = 0; generation.load() == round; i++) {
            if (i < 2000) RELAX();
            else std::this_thread::yield();
        }
    }

    const int size;

   private:
    void serve(int) {
        for (int seen = 0;;) {
            const std::function<void()>* work;
            {
                std::unique_lock<std::mutex> hold(lock);
                wake.wait(hold, [&] { return job_number != seen; });
                if (leaving) return;
                seen = job_number;
                work = job;
            }
            (*work)();
            barrier();
        }
    }

    std::vector<std::thread> workers;
    std::mutex lock;
    std::condition_variable wake;
    const std::function<void()>* job = nullptr;
    int job_number = 0;
    bool leaving = false;
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> generation{0};
};
