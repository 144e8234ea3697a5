// A number that threads sleep on until it changes. A thread that changes it rings afterwards.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__linux__) && !defined(HEADRACE_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

class Bell {
   public:
    std::atomic<uint32_t> number{0};

    // Returns when the number is not `seen`, or spuriously.
    void sleep_while(uint32_t seen) {
        asleep++;  // then the number is read once more: a thread that changes it after that sees a sleeper
        wait(seen);
        asleep--;
    }
    // Wakes at least `most` threads, or all if fewer sleep.
    void ring(int most) {
        if (asleep > 0) wake(most);
    }

   private:
    std::atomic<int> asleep{0};

#if defined(__linux__) && !defined(HEADRACE_NO_FUTEX)
    static_assert(sizeof(std::atomic<uint32_t>) == 4, "the kernel reads the number where it lies");
    void wait(uint32_t seen) { syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake(int most) { syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0); }
#else
    std::mutex lock;
    std::condition_variable changed;

    void wait(uint32_t seen) {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [&] { return number != seen; });
    }
    void wake(int) {
        { std::lock_guard<std::mutex> hold(lock); }  // a sleeper has not read the number yet, or receives this
        changed.notify_all();
    }
#endif
};
