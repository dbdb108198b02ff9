#pragma once
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace spark {

// What threads sleep at. Who rings waits for nobody, and nobody who sleeps has a lock: one that is stopped, or has lost its
// core, would have whoever launches steps wait for it. (A condition variable's notifier waits until those that it woke
// before have left, in glibc before 2.41.)
class Bell {
  public:
    uint32_t rung() const { return rings_.load(); }

    void ring() {
        rings_++;
#if defined(__linux__)
        syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
        { const std::lock_guard<std::mutex> lock(mutex_); }
        sleepers_.notify_all();
#endif
    }

    // Sleep until it was rung after `seen`, or so long; less than 0: as long as it takes. It may be for less.
    void wait(uint32_t seen, int64_t ns) {
#if defined(__linux__)
        const timespec most{time_t(ns / 1000000000), long(ns % 1000000000)};
        syscall(SYS_futex, &rings_, FUTEX_WAIT_PRIVATE, seen, ns < 0 ? nullptr : &most, nullptr, 0);
#else
        std::unique_lock<std::mutex> lock(mutex_);
        const auto rang = [&] { return rings_.load() != seen; };
        if (ns < 0)
            sleepers_.wait(lock, rang);
        else
            sleepers_.wait_for(lock, std::chrono::nanoseconds(ns), rang);
#endif
    }

  private:
    std::atomic<uint32_t> rings_{0};
#if !defined(__linux__)
    std::mutex mutex_;
    std::condition_variable sleepers_;
#endif
};
static_assert(sizeof(std::atomic<uint32_t>) == 4);

} // namespace spark
