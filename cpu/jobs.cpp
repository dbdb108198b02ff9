// Experts that the CPU computes beside the GPU: jobs of a ring, and the threads that do them (expert_job.h, spark_cpu.h).
// Twin: expert_ffn of engine/ops/reference.py, without the fold over ranks, which is whose the job is.
//
// A job that is claimed is open: a slot of the pool with its items, chunks of rows of gate and up, then, when all of these
// are done, chunks of rows of down. Threads take items of the oldest open job that has one; who finds none claims the next
// job. So several jobs overlap, a job is claimed when somebody has time for it, and a thread that is stopped holds up no
// more than the jobs that it has an item of.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "bell.h"
#include "presence.h"
#include "workspace.h"

using namespace spark;

namespace {

static_assert(sizeof(spark_job) == 256 && offsetof(spark_job, source) == 64 && offsetof(spark_job, answer) == 192);
static_assert(SPARK_JOB_ROWS == 256); // any byte names a row

constexpr uint64_t kClosed = 0xffffffff; // the lower half of a ticket: no items
constexpr int64_t kLeastItems = 4;       // for each thread, or items are halved: the last ones end together
constexpr int kLongestNap = 6;           // how often a nap without work becomes twice as long
constexpr int kLooks = 64;               // of a thread that has nothing to do, between two at the clock
constexpr uint64_t kLostNs = 500000;     // from one look to the next: another one had the core, and
constexpr uint64_t kPoliteNs = 10000000; // gets it back at each look for so long: it may be a thread with half a job

template <class T> T loaded(const T &word, int order = __ATOMIC_ACQUIRE) { return __atomic_load_n(&word, order); }
template <class T> void stored(T &word, T value, int order = __ATOMIC_RELEASE) { __atomic_store_n(&word, value, order); }
bool swapped(unsigned long long &word, unsigned long long from, unsigned long long to) {
    return __atomic_compare_exchange_n(&word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1000000000 + uint64_t(t.tv_nsec);
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class T> T *at(uint64_t address) { return reinterpret_cast<T *>(uintptr_t(address)); }

unsigned long long answer_of(uint64_t number, int state) { return number * 4 + unsigned(state); }

bool bind_to(int core) {
#if defined(__linux__)
    if (core < 0 || core >= CPU_SETSIZE)
        return false;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return pthread_setaffinity_np(pthread_self(), sizeof cores, &cores) == 0;
#else
    return core < -1;
#endif
}

// What a thread is called in /proc, where whoever looks for those that compute experts finds them.
void name_thread() {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), SPARK_JOBS_THREAD);
#endif
}

// A job that is open. What is not atomic is written while the ticket is closed and read by who holds an item.
struct Slot {
    // The number's lower half, then the next item. A claim is a compare-and-swap of the whole, so that it fails if the
    // slot got another job under a thread's eyes.
    alignas(64) std::atomic<uint64_t> ticket{kClosed};
    alignas(64) std::atomic<int64_t> n_items{0}, n_first{0};
    alignas(64) std::atomic<int64_t> done_first{0}, done_second{0};
    alignas(64) spark_job job;
    spark_job *record;
    const spark_bank *bank;
    uint64_t number;
    int64_t rows_first; // of an item
    int32_t token[SPARK_JOB_TOKENS];
    std::unique_ptr<Buffer<Activations>> input, hidden; // [tokens][supers]
    std::unique_ptr<Buffer<float>> z;                   // [tokens][n_ff]
    std::unique_ptr<std::atomic<int32_t>[]> filled;     // rows of a block of 32 of z that are there
};

} // namespace

struct spark_jobs {
    spark_jobs(const spark_jobs_plan &plan, const Kernels &kernels);
    ~spark_jobs();

    void wake(int64_t awake_ns = 0);
    void dismiss();
    int64_t missing(int64_t for_ns) const { return presence_.missing(now_ns(), uint64_t(for_ns)); }
    bool drain(int64_t timeout_ns);
    void reset();
    void counts(int64_t *to);
    void hold(int place, int64_t n);
    bool is_here() const { return getpid() == process_; }

  private:
    void serve(int thread, int core);
    void sleep(int thread, uint64_t seen, int64_t nap_ns);
    void rest(int place);
    bool take_one(int thread);
    bool take(Slot &slot, int thread);
    bool claim_next();
    bool open(Slot &slot, spark_job &record, uint64_t number);
    void decline(spark_job &record, uint64_t number, int why);
    bool is_valid(const spark_job &job) const;
    void do_first(Slot &slot, int64_t item, int thread);
    void do_second(Slot &slot, int64_t item);
    void finish(Slot &slot);
    Weights part(const Slot &slot, int which) const;

    const Kernels &kernels_;
    spark_job *const ring_;
    const int64_t n_records_, n_threads_, max_tokens_, spin_ns_, nap_ns_;
    const std::vector<spark_bank> banks_;
    const pid_t process_;
    std::vector<Slot> slots_;
    Buffer<float> scratch_; // [thread][2][tokens][kChunkRows]
    alignas(64) std::atomic<uint64_t> next_{1};  // the job that is claimed next
    alignas(64) std::atomic<uint64_t> open_{0};  // a bit for each slot that has items
    std::atomic<int64_t> claimed_{0};            // jobs that are claimed, or about to be, and not answered
    alignas(64) std::atomic<bool> stop_{false}, closing_{false};
    std::atomic<int> held_at_{SPARK_HOLD_NOWHERE};
    std::atomic<int64_t> counts_[SPARK_JOBS_COUNTS] = {};
    std::atomic<uint64_t> wakes_{0}, awake_until_{0};
    std::atomic<uint64_t> dismissed_{~uint64_t(0)}; // the wakes after which nobody needs to look
    Presence presence_;
    Bell bell_;
    std::mutex mutex_; // of what tests hold
    std::condition_variable released_;
    int64_t to_hold_ = 0;
    std::vector<std::thread> threads_;
};

spark_jobs::spark_jobs(const spark_jobs_plan &plan, const Kernels &kernels)
    : kernels_(kernels), ring_(plan.ring), n_records_(plan.n_records), n_threads_(plan.threads), max_tokens_(plan.max_tokens),
      spin_ns_(plan.spin_ns), nap_ns_(plan.nap_ns), banks_(plan.banks, plan.banks + plan.n_banks), process_(getpid()),
      slots_(size_t(plan.n_records)),
      scratch_(plan.threads * 2 * plan.max_tokens * kChunkRows), presence_(plan.threads) {
    int64_t widest = 0, n_ff = 0;
    for (const spark_bank &bank : banks_) {
        widest = std::max({widest, bank.n_embd, bank.n_ff});
        n_ff = std::max(n_ff, bank.n_ff);
    }
    for (Slot &slot : slots_) {
        slot.input = std::make_unique<Buffer<Activations>>(max_tokens_ * supers(widest));
        slot.hidden = std::make_unique<Buffer<Activations>>(max_tokens_ * supers(n_ff));
        slot.z = std::make_unique<Buffer<float>>(max_tokens_ * n_ff);
        slot.filled = std::make_unique<std::atomic<int32_t>[]>(size_t(n_ff / kChunkRows + 1));
        for (int64_t b = 0; b <= n_ff / kChunkRows; b++)
            slot.filled[size_t(b)] = 0;
    }
    threads_.reserve(size_t(plan.threads));
    try {
        for (int64_t i = 0; i < plan.threads; i++)
            threads_.emplace_back([this, i, core = plan.cores[i]] { serve(int(i), core); });
    } catch (...) {
        stop_ = true;
        wake();
        for (std::thread &thread : threads_)
            thread.join();
        throw;
    }
}

spark_jobs::~spark_jobs() {
    hold(SPARK_HOLD_NOWHERE, 0);
    drain(INT64_MAX);
    stop_ = true;
    wake();
    for (std::thread &thread : threads_)
        thread.join();
}

// --- threads ---

void spark_jobs::serve(int thread, int core) {
    name_thread();
    if (bind_to(core))
        counts_[SPARK_JOBS_BOUND]++;
    uint64_t idle_since = 0, seen = wakes_.load(), last = now_ns(), polite_until = 0;
    int looks = 0, naps = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        if (take_one(thread) || claim_next()) {
            presence_.sign(thread, last = now_ns());
            idle_since = 0, looks = 0, naps = 0;
            continue;
        }
        pause_briefly();
        if (++looks % kLooks)
            continue;
        const uint64_t now = now_ns(), wakes = wakes_.load();
        presence_.sign(thread, now);
        if (now - last > kLostNs)
            polite_until = now + kPoliteNs;
        if (now < polite_until)
            std::this_thread::yield();
        last = now;
        const bool patient = now - idle_since < uint64_t(spin_ns_) && dismissed_.load(std::memory_order_relaxed) != wakes;
        if (!idle_since || wakes != seen)
            idle_since = now, seen = wakes, naps = 0;
        else if (!patient && now >= awake_until_.load(std::memory_order_relaxed)) {
            sleep(thread, seen, nap_ns_ << std::min(naps++, kLongestNap));
            if (thread) // the first thread looks once, and goes on with its nap
                idle_since = 0;
            last = now_ns();
        }
    }
}

void spark_jobs::sleep(int thread, uint64_t seen, int64_t nap_ns) {
    counts_[SPARK_JOBS_ASLEEP]++; // sequentially consistent, as is open_: who opens a job sees the sleeper, or it the job
    const bool open = open_.load(); // and nothing to do: others have its last items, or one of them was stopped
    const bool naps = !thread || open;
    const uint64_t until = now_ns() + uint64_t(open ? nap_ns_ : nap_ns);
    while (true) {
        const uint32_t rung = bell_.rung(); // before it looks: what changes afterwards rings
        if (stop_.load() || (!open && open_.load()) || wakes_.load() != seen)
            break;
        const uint64_t now = naps ? now_ns() : 0;
        if (naps && now >= until)
            break;
        bell_.wait(rung, naps ? int64_t(until - now) : -1);
    }
    counts_[SPARK_JOBS_ASLEEP]--;
}

void spark_jobs::wake(int64_t awake_ns) {
    const uint64_t now = now_ns(), until = now + uint64_t(awake_ns);
    uint64_t before = awake_until_.load();
    while (before < until && !awake_until_.compare_exchange_weak(before, until)) {
    }
    wakes_++;
    presence_.expect(now, std::max(awake_until_.load(), now + uint64_t(spin_ns_)));
    if (counts_[SPARK_JOBS_ASLEEP].load() > 0)
        bell_.ring();
}

void spark_jobs::dismiss() {
    awake_until_ = 0;
    dismissed_ = wakes_.load();
    presence_.expect(0, 0);
}

void spark_jobs::rest(int place) {
    if (held_at_.load(std::memory_order_relaxed) != place)
        return;
    std::unique_lock<std::mutex> lock(mutex_);
    if (held_at_ != place || to_hold_ == 0)
        return;
    to_hold_--;
    counts_[SPARK_JOBS_HELD]++;
    released_.wait(lock, [&] { return held_at_ != place; });
    counts_[SPARK_JOBS_HELD]--;
}

void spark_jobs::hold(int place, int64_t n) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        held_at_ = place;
        to_hold_ = n;
    }
    released_.notify_all();
}

bool spark_jobs::drain(int64_t timeout_ns) {
    closing_ = true;
    const uint64_t since = now_ns();
    while (claimed_.load()) {
        if (now_ns() - since > uint64_t(timeout_ns))
            return false;
        std::this_thread::yield();
    }
    return true;
}

void spark_jobs::reset() {
    for (int64_t i = 0; i < n_records_; i++) {
        stored(ring_[i].posted, 0ull);
        stored(ring_[i].back, 0ull);
        stored(ring_[i].answer, 0ull);
        stored(ring_[i].accepted, 0ull);
    }
    closing_ = false;
    next_ = 1;
}

void spark_jobs::counts(int64_t *to) {
    for (int i = 0; i < SPARK_JOBS_COUNTS; i++)
        to[i] = counts_[i].load();
}

// --- jobs ---

// Claim the next job, if it is posted, and open it. Whether there was one.
bool spark_jobs::claim_next() {
    uint64_t number = next_.load(std::memory_order_acquire);
    const int64_t place = int64_t((number - 1) % uint64_t(n_records_));
    spark_job &record = ring_[place];
    const uint64_t posted = loaded(record.posted);
    if (posted < number)
        return false;
    claimed_++;
    // A later job in its place: it was taken back before anybody came.
    const bool mine = next_.compare_exchange_strong(number, number + 1) && posted == number;
    if (mine) {
        rest(SPARK_HOLD_BEFORE_CLAIM);
        // A thread that was stopped above may come when the record has another job: then that one's answer stays.
        const unsigned long long before = loaded(record.answer);
        if (before < answer_of(number, 0) && swapped(record.answer, before, answer_of(number, SPARK_JOB_CLAIMED))) {
            rest(SPARK_HOLD_CLAIMED);
            if (loaded(record.back, __ATOMIC_SEQ_CST) >= number || closing_.load())
                decline(record, number, SPARK_JOBS_DECLINED);
            else if (open(slots_[size_t(place)], record, number))
                return true; // `finish` counts it off
            else
                decline(record, number, SPARK_JOBS_REFUSED);
        }
    }
    claimed_--;
    return true;
}

void spark_jobs::decline(spark_job &record, uint64_t number, int why) {
    counts_[why]++;
    swapped(record.answer, answer_of(number, SPARK_JOB_CLAIMED), answer_of(number, SPARK_JOB_DECLINED));
}

bool spark_jobs::is_valid(const spark_job &job) const {
    if (job.bank < 0 || job.bank >= int64_t(banks_.size()) || job.count < 1 || job.count > max_tokens_)
        return false;
    const spark_bank &bank = banks_[size_t(job.bank)];
    const int64_t rows = job.part == SPARK_JOB_FIRST ? bank.n_ff : bank.n_embd;
    if (job.part < SPARK_JOB_FIRST || job.part > SPARK_JOB_BOTH || job.first < 0 || job.first > job.last || job.last > rows)
        return false;
    return job.part != SPARK_JOB_FIRST || is_float(bank.type[2]) || (job.first % kBlock == 0 && job.last % kBlock == 0);
}

// The job's items are there for all threads. False: a field is not what it may be.
bool spark_jobs::open(Slot &slot, spark_job &record, uint64_t number) {
    record.claimed_ns = now_ns();
    const auto filled = offsetof(spark_job, source); // what its owner writes no more; `back` it may write at any time
    std::memcpy(reinterpret_cast<char *>(&slot.job) + filled, reinterpret_cast<const char *>(&record) + filled,
                offsetof(spark_job, answer) - filled);
    const spark_job &job = slot.job;
    if (!is_valid(job))
        return false;
    stored(record.accepted, static_cast<unsigned long long>(number));
    slot.record = &record;
    slot.bank = &banks_[size_t(job.bank)];
    slot.number = number;
    const bool second = job.part == SPARK_JOB_SECOND;
    const int64_t cols = second ? slot.bank->n_ff : slot.bank->n_embd;
    for (int i = 0; i < job.count; i++)
        slot.token[i] = job.token[i];
    if (!is_float(slot.bank->type[second ? 2 : 0]))
        for (int i = 0; i < job.count; i++)
            kernels_.arrange(at<int8_t>(job.input) + job.token[i] * cols,
                             at<float>(job.input_scales) + job.token[i] * (cols / kBlock), cols,
                             slot.input->get() + i * supers(cols));

    const int64_t rows = job.last - job.first;
    const int64_t rows_before = job.part == SPARK_JOB_FIRST ? rows : second || !rows ? 0 : slot.bank->n_ff;
    slot.rows_first = rows_before >= n_threads_ * kLeastItems * kChunkRows ? kChunkRows : kChunkRows / 2;
    const int64_t n_first = (rows_before + slot.rows_first - 1) / slot.rows_first;
    const int64_t n_second = job.part == SPARK_JOB_FIRST ? 0 : (rows + kChunkRows - 1) / kChunkRows;
    slot.n_first.store(n_first, std::memory_order_relaxed);
    slot.n_items.store(n_first + n_second, std::memory_order_relaxed);
    slot.done_first.store(0, std::memory_order_relaxed);
    slot.done_second.store(0, std::memory_order_relaxed);
    if (n_first + n_second == 0) {
        finish(slot);
        return true;
    }
    slot.ticket.store(number << 32, std::memory_order_release);
    open_.fetch_or(uint64_t(1) << (&slot - slots_.data()));
    if (counts_[SPARK_JOBS_ASLEEP].load() > 0)
        bell_.ring();
    return true;
}

void spark_jobs::finish(Slot &slot) {
    spark_job &record = *slot.record;
    const uint64_t number = slot.number;
    slot.ticket.store(kClosed);
    open_.fetch_and(~(uint64_t(1) << (&slot - slots_.data())));
    counts_[SPARK_JOBS_DONE]++;
    record.done_ns = now_ns();
    stored(record.answer, answer_of(number, SPARK_JOB_DONE)); // nothing of the slot is read behind this
    claimed_--;
}

// --- items ---

// An item of the oldest open job that has one.
bool spark_jobs::take_one(int thread) {
    const uint64_t open = open_.load(std::memory_order_acquire);
    if (!open)
        return false;
    const auto n = uint64_t(n_records_), oldest = (next_.load(std::memory_order_relaxed) - 1) % n;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t place = (oldest + i) % n;
        if (open >> place & 1 && take(slots_[place], thread))
            return true;
    }
    return false;
}

bool spark_jobs::take(Slot &slot, int thread) {
    uint64_t ticket = slot.ticket.load(std::memory_order_acquire);
    int64_t item, n_first;
    do {
        item = int64_t(uint32_t(ticket));
        n_first = slot.n_first.load(std::memory_order_relaxed);
        if (uint32_t(ticket) == kClosed || item >= slot.n_items.load(std::memory_order_relaxed))
            return false;
        if (item >= n_first && slot.done_first.load(std::memory_order_acquire) < n_first)
            return false; // z is not there yet
    } while (!slot.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const int64_t n_second = slot.n_items.load(std::memory_order_relaxed) - n_first;
    rest(SPARK_HOLD_ITEM);
    if (item < n_first) {
        do_first(slot, item, thread);
        if (slot.done_first.fetch_add(1, std::memory_order_acq_rel) + 1 == n_first && !n_second)
            finish(slot);
    } else {
        do_second(slot, item - n_first);
        if (slot.done_second.fetch_add(1, std::memory_order_acq_rel) + 1 == n_second)
            finish(slot);
    }
    return true;
}

Weights spark_jobs::part(const Slot &slot, int which) const {
    const spark_bank &bank = *slot.bank;
    const int64_t rows = which == 2 ? bank.n_embd : bank.n_ff, cols = which == 2 ? bank.n_ff : bank.n_embd;
    const float scale = which == 0 ? slot.job.gate_scale : 1.0f;
    return {at<uint8_t>(slot.job.source[which]), rows, cols, row_bytes(bank.type[which], cols), bank.type[which], scale};
}

void spark_jobs::do_first(Slot &slot, int64_t item, int thread) {
    const spark_job &job = slot.job;
    const spark_bank &bank = *slot.bank;
    const bool only = job.part == SPARK_JOB_FIRST, plain = is_float(bank.type[2]);
    const int64_t F = bank.n_ff, begin = only ? job.first : 0, end = only ? job.last : F;
    const int64_t first = begin + item * slot.rows_first, last = std::min(first + slot.rows_first, end), count = job.count;
    Weights gate = part(slot, 0), up = part(slot, 1);
    const Weights down = part(slot, 2);
    gate.then = up.data + first * up.row_bytes;
    if (const int64_t next = first + n_threads_ * slot.rows_first; next < end)
        up.then = gate.data + next * gate.row_bytes;
    else if (!only)
        up.then = down.data + (job.first + item * kChunkRows % (job.last - job.first)) * down.row_bytes;
    const bool floats = is_float(bank.type[0]);
    const Inputs in{slot.input->get(), at<float>(job.input), supers(bank.n_embd), bank.n_embd};
    float *const gated = scratch_.get() + thread * 2 * max_tokens_ * kChunkRows, *const upped = gated + max_tokens_ * kChunkRows;
    kernels_.product(gate, first, last, in, floats ? slot.token : nullptr, count, gated, kChunkRows);
    kernels_.product(up, first, last, in, floats ? slot.token : nullptr, count, upped, kChunkRows);
    float *const z = only && plain ? at<float>(job.output) : slot.z->get();
    const auto activate = bank.activation == SPARK_GELU ? kernels_.gelu_mul : kernels_.silu_mul;
    for (int64_t t = 0; t < count; t++)
        activate(gated + t * kChunkRows, upped + t * kChunkRows, last - first, z + t * F + first);
    const int64_t block = first / kBlock; // which is the item, or half of which, since no item crosses a block
    const int64_t rows = last - first;
    if (plain || slot.filled[size_t(block)].fetch_add(int32_t(rows), std::memory_order_acq_rel) + rows < kBlock)
        return;
    slot.filled[size_t(block)].store(0, std::memory_order_relaxed);
    for (int64_t t = 0; t < count; t++) {
        Activations *const row = slot.hidden->get() + t * supers(F);
        kernels_.quantize_block(z + t * F + block * kBlock, block, row);
        if (only)
            kernels_.block_of(row, block, at<int8_t>(job.output) + t * F + block * kBlock,
                              at<float>(job.output_scales) + t * (F / kBlock) + block);
    }
}

void spark_jobs::do_second(Slot &slot, int64_t item) {
    const spark_job &job = slot.job;
    const spark_bank &bank = *slot.bank;
    const int64_t D = bank.n_embd, F = bank.n_ff;
    const int64_t first = job.first + item * kChunkRows, last = std::min<int64_t>(first + kChunkRows, job.last);
    const bool given = job.part == SPARK_JOB_SECOND;
    Weights down = part(slot, 2);
    if (const int64_t next = first + n_threads_ * kChunkRows; next < job.last)
        down.then = down.data + next * down.row_bytes;
    const Inputs in{given ? slot.input->get() : slot.hidden->get(), given ? at<float>(job.input) : slot.z->get(),
                    supers(F), F};
    const bool chosen = given && is_float(bank.type[2]); // rows of the input, of which some are the job's
    kernels_.product(down, first, last, in, chosen ? slot.token : nullptr, job.count, at<float>(job.output) + first, D);
}

// --- the C interface ---

static bool is_sound(const spark_jobs_plan &plan) {
    if (plan.n_records < 1 || plan.n_records > SPARK_JOB_RECORDS || plan.threads < 1 || plan.n_banks < 1 || plan.max_tokens < 1 ||
        plan.max_tokens > SPARK_JOB_TOKENS)
        return false;
    for (int64_t i = 0; i < plan.n_banks; i++) {
        const spark_bank &bank = plan.banks[i];
        for (int64_t type : bank.type)
            if (!is_known(type))
                return false;
        if (is_float(bank.type[0]) != is_float(bank.type[1]) || bank.n_embd < 1 || bank.n_ff < 1)
            return false;
        if ((!is_float(bank.type[0]) && bank.n_embd % kBlock) || (!is_float(bank.type[2]) && bank.n_ff % kBlock))
            return false;
    }
    return true;
}

extern "C" {

spark_jobs *spark_jobs_create(const spark_jobs_plan *plan) {
    const Kernels *kernels = choose_kernels(int(plan->isa));
    if (!kernels || !is_sound(*plan))
        return nullptr;
    try {
        return new spark_jobs(*plan, *kernels);
    } catch (const std::exception &) { // memory or threads
        return nullptr;
    }
}

void spark_jobs_destroy(spark_jobs *jobs) {
    if (jobs->is_here()) // else a child of a fork: the threads that its parts wait for do not exist
        delete jobs;
}

void spark_jobs_wake(spark_jobs *jobs, int64_t awake_ns) { jobs->wake(awake_ns); }
void spark_jobs_dismiss(spark_jobs *jobs) { jobs->dismiss(); }
int64_t spark_jobs_missing(const spark_jobs *jobs, int64_t for_ns) { return jobs->missing(for_ns); }
int32_t spark_jobs_drain(spark_jobs *jobs, int64_t timeout_ns) { return jobs->drain(timeout_ns); }
void spark_jobs_reset(spark_jobs *jobs) { jobs->reset(); }
void spark_jobs_counts(spark_jobs *jobs, int64_t *counts) { jobs->counts(counts); }
void spark_jobs_hold(spark_jobs *jobs, int32_t place, int64_t n) { jobs->hold(place, n); }

void spark_job_post(spark_job *ring, int64_t n_records, uint64_t number, int64_t n) {
    for (int64_t i = 0; i < n; i++, number++)
        stored(ring[(number - 1) % uint64_t(n_records)].posted, static_cast<unsigned long long>(number));
}

static int32_t answered(const spark_job &job, uint64_t number) {
    const uint64_t answer = loaded(job.answer, __ATOMIC_SEQ_CST);
    return answer / 4 == number ? int32_t(answer % 4) : 0;
}

int32_t spark_job_take_back(spark_job *ring, int64_t n_records, uint64_t number) {
    spark_job &job = ring[(number - 1) % uint64_t(n_records)];
    stored(job.back, static_cast<unsigned long long>(number), __ATOMIC_SEQ_CST);
    return answered(job, number);
}

int32_t spark_job_wait(spark_job *ring, int64_t n_records, uint64_t number, int64_t timeout_ns) {
    const spark_job &job = ring[(number - 1) % uint64_t(n_records)];
    const uint64_t since = now_ns();
    for (int looks = 1;; looks++) {
        const int32_t state = answered(job, number);
        if (state == SPARK_JOB_DONE || state == SPARK_JOB_DECLINED)
            return state;
        if (looks % kLooks == 0) {
            if (now_ns() - since >= uint64_t(timeout_ns))
                return state;
            std::this_thread::yield();
        }
        pause_briefly();
    }
}

} // extern "C"
