#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace spark {

// Which of some threads are there: each gives a sign as it works or looks for work. Times are of one clock.
class Presence {
  public:
    explicit Presence(int64_t threads) : signs_(size_t(threads)) {}

    void sign(int thread, uint64_t now) { signs_[size_t(thread)].ns.store(now, std::memory_order_relaxed); }

    // From now on all should be there, until a time; if they should have been anyway, for as long as before. By one caller.
    void expect(uint64_t now, uint64_t until) {
        if (now >= until_.load())
            since_ = now;
        until_ = until;
    }

    // Those that should be there and have given no sign for so long.
    int64_t missing(uint64_t now, uint64_t for_ns) const {
        const uint64_t since = since_.load();
        if (now >= until_.load())
            return 0;
        return std::count_if(signs_.begin(), signs_.end(), [&](const Sign &sign) {
            const uint64_t last = std::max(since, sign.ns.load(std::memory_order_relaxed));
            return now > last && now - last > for_ns;
        });
    }

  private:
    struct Sign {
        alignas(64) std::atomic<uint64_t> ns{0};
    };
    std::vector<Sign> signs_;
    std::atomic<uint64_t> since_{0}, until_{0};
};

} // namespace spark
