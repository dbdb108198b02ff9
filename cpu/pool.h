// A pool of threads that share the items of one loop at a time.
//
// Items are claimed from one atomic ticket, so a thread that wakes late, or never (the system gave its
// core away, or the process forked), costs nothing: the caller takes the items itself and waits only for
// those in progress. Idle threads spin for some microseconds, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace spark {

class Pool {
  public:
    explicit Pool(int threads); // the caller's thread is one of them; throws std::system_error
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return int(workers_.size()) + 1; }

    // work(item, thread) for items 0..n-1, in any order, on threads 0..threads()-1; returns when all are done.
    template <class Work> void run(int64_t n, Work work) {
        if (n <= 1 || workers_.empty() || forked()) {
            for (int64_t i = 0; i < n; i++)
                work(i, 0);
            return;
        }
        run_shared(n, [](void *w, int64_t item, int thread) { (*static_cast<Work *>(w))(item, thread); }, &work);
    }

  private:
    using Call = void (*)(void *, int64_t, int);

    bool forked() const;
    void run_shared(int64_t n, Call call, void *work);
    void take(uint64_t ticket, int thread);
    void serve(int thread);

    // Epoch of the loop in the upper half, next item in the lower; kClosed between loops. A claim is a
    // compare-and-swap of the whole, so it fails if the loop changed under a thread's eyes.
    static constexpr uint32_t kClosed = 0xffffffff;
    alignas(64) std::atomic<uint64_t> ticket_{kClosed};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<uint32_t> n_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void *> work_{nullptr};

    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    struct Bed {
        std::mutex mutex;
        std::condition_variable wake;
    };
    std::unique_ptr<Bed> bed_;
    std::vector<std::thread> workers_;
    uint64_t generation_;
};

} // namespace spark
