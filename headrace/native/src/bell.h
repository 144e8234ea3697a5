// A number that threads sleep on until it changes. Whoever changes it rings afterwards.
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

    // Returns when the number is not `seen`, or for no reason.
    void sleep_while(uint32_t seen) {
        asleep++;  // then the number is looked at once more: whoever changes it after that look sees a sleeper
        wait(seen);
        asleep--;
    }
    // Wakes `most` threads at least, where so many sleep.
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
        { std::lock_guard<std::mutex> hold(lock); }  // a sleeper has not looked at the number yet, or hears this
        changed.notify_all();
    }
#endif
};
