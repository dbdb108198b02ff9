#include "pool.h"

#include <pthread.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace spark {

namespace {

constexpr int kSpins = 4000;      // of a worker before it sleeps: tens of microseconds
constexpr int kCallerSpins = 200; // of the caller before it yields its core to a worker

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Raised in a child process, where the workers do not exist.
std::atomic<uint64_t> forks{0};

uint64_t watch_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    return forks.load();
}

} // namespace

Pool::Pool(int threads) : bed_(new Bed), generation_(watch_forks()) {
    workers_.reserve(size_t(threads) - 1);
    try {
        for (int i = 1; i < threads; i++)
            workers_.emplace_back([this, i] { serve(i); });
    } catch (...) {
        stop_ = true;
        for (std::thread &worker : workers_)
            worker.join();
        throw;
    }
}

Pool::~Pool() {
    if (forked()) {
        for (std::thread &worker : workers_)
            worker.detach();
        bed_.release(); // its destructor would wait for sleepers that this process does not have
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(bed_->mutex);
        stop_ = true;
    }
    bed_->wake.notify_all();
    for (std::thread &worker : workers_)
        worker.join();
}

bool Pool::forked() const { return forks.load(std::memory_order_relaxed) != generation_; }

void Pool::run_shared(int64_t n, Call call, void *work) {
    n_.store(uint32_t(n), std::memory_order_relaxed);
    call_.store(call, std::memory_order_relaxed);
    work_.store(work, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    const uint64_t ticket = epoch << 32;
    ticket_.store(ticket); // sequentially consistent, as is sleepers_: a worker sees the loop or is seen asleep
    if (sleepers_.load() > 0) {
        { const std::lock_guard<std::mutex> lock(bed_->mutex); }
        bed_->wake.notify_all();
    }
    take(ticket, 0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != uint32_t(n); spins++) {
        if (spins < kCallerSpins)
            pause_briefly();
        else
            std::this_thread::yield();
    }
    // Close before the next loop changes what a claim relies on.
    ticket_.store(ticket | kClosed);
}

// Claim and do items of the loop that `ticket` was read from, until none is left.
void Pool::take(uint64_t ticket, int thread) {
    const uint32_t n = n_.load(std::memory_order_relaxed);
    const Call call = call_.load(std::memory_order_relaxed);
    void *const work = work_.load(std::memory_order_relaxed);
    const uint64_t epoch = ticket >> 32;
    while (ticket >> 32 == epoch && uint32_t(ticket) < n) {
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
            call(work, int64_t(uint32_t(ticket)), thread);
            done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }
}

void Pool::serve(int thread) {
    uint64_t seen = 0; // the epoch whose items this thread has looked for
    int spins = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        const uint64_t ticket = ticket_.load(std::memory_order_acquire);
        if (ticket >> 32 != seen) {
            seen = ticket >> 32;
            spins = 0;
            take(ticket, thread);
            continue;
        }
        if (spins++ < kSpins) {
            pause_briefly();
            continue;
        }
        std::unique_lock<std::mutex> lock(bed_->mutex);
        sleepers_.fetch_add(1);
        bed_->wake.wait(lock, [&] { return stop_ || ticket_.load() >> 32 != seen; });
        sleepers_.fetch_sub(1);
        spins = 0;
    }
}

} // namespace spark
