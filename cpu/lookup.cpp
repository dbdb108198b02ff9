// Texts that drafts of replies are looked up in; engine/drafting/lookup.py is the caller, and says what it is for.
//
// A run of tokens is found by its hash, in a table of where runs of that length ended last. What lies there may be
// another run with the same place in the table, or what a ring has written over: whatever is found is compared.
#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "spark_cpu.h"

namespace {

constexpr int64_t kLengths[] = {2, 4, 8, 16, 32}; // of the runs that are hashed
constexpr int kLengthCount = 5;
constexpr int64_t kLongest = kLengths[kLengthCount - 1];
constexpr int64_t kMostRun = 64; // how far back a run is compared
constexpr int64_t kChunk = 64;    // tokens by which texts that begin alike are told apart
constexpr int32_t kEnd = -1;      // what ends a text: no token
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;

uint64_t mixed(uint64_t h) {
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93u;
    return h ^ h >> 32;
}

// A number for each place of a run, from its last token on.
struct Factors {
    uint64_t of[kLongest];
    Factors() {
        for (int64_t i = 0; i < kLongest; ++i) of[i] = mixed((uint64_t)(i + 1) * kOdd) | 1;
    }
};
const Factors factors;

// Hashes of the runs of kLengths that end before `end`, of a text that begins at `begin`; how many there are.
int hash_runs(const int32_t *begin, const int32_t *end, uint64_t *found) {
    uint64_t h = 0;
    int n = 0;
    const int64_t most = std::min<int64_t>(end - begin, kLongest);
    for (int64_t i = 0; i < most; ++i) {
        h += ((uint64_t)(uint32_t)end[-1 - i] + 1) * factors.of[i];
        if (i + 1 == kLengths[n]) found[n++] = h * kOdd;
    }
    return n;
}

// Where a run ended last: the index behind it, 0 where that is not known, and how it went on there and before: SPARK_ONCE,
// SPARK_OTHER, ...
struct Place {
    uint32_t packed = 0;
    int64_t index() const { return packed >> 2; }
    int32_t seen() const { return (int32_t)(packed & 3); }
    static Place at(int64_t index, int32_t seen) { return {(uint32_t)index << 2 | (uint32_t)seen}; }
};

struct Table {
    std::vector<Place> places[kLengthCount];
    int shift = 63;
    Place *last[kLengthCount] = {}; // the places of the runs that end with the last token, and what was there before
    Place before[kLengthCount];
    int n_last = 0;

    void allocate(int64_t n_tokens) {
        int bits = 10;
        while ((int64_t)1 << bits < n_tokens) ++bits;
        for (auto &p : places) p.assign((size_t)1 << bits, Place());
        shift = 64 - bits;
        n_last = 0;
    }

    Place &of(int k, uint64_t hash) { return places[k][hash >> shift]; }

    // A text begins: what was noted last goes on with none of its tokens.
    void part() { n_last = 0; }

    // Note the runs that end before text[i], and lie behind text[begin - 1].
    void note(const int32_t *text, int64_t begin, int64_t i) {
        for (int k = 0; k < n_last; ++k) { // text[i - 1] is what followed them
            const Place was = before[k];
            if (!was.index() || last[k]->index() != i - 1) continue;
            const bool same = text[was.index()] == text[i - 1];
            *last[k] = Place::at(i - 1, !same ? SPARK_OTHER : was.seen() < SPARK_SAME ? SPARK_SAME : SPARK_OFTEN);
        }
        uint64_t h[kLengthCount];
        n_last = hash_runs(text + begin, text + i, h);
        for (int k = 0; k < n_last; ++k) {
            last[k] = &of(k, h[k]);
            before[k] = *last[k];
            *last[k] = Place::at(i, before[k].seen());
        }
    }

    // Note the runs of a text that lies from `begin` to `end`.
    void add(const int32_t *text, int64_t begin, int64_t end) {
        part();
        for (int64_t i = begin + 1; i <= end; ++i) note(text, begin, i);
    }
};

// How many tokens before text[place] equal those before own[n], both of texts that begin at 0.
int64_t run_of(const int32_t *text, int64_t place, const int32_t *own, int64_t n) {
    const int64_t most = std::min({place, n, kMostRun});
    int64_t run = 0;
    while (run < most && text[place - 1 - run] == own[n - 1 - run] && own[n - 1 - run] != kEnd) ++run;
    return run;
}

} // namespace

// A ring of texts, each followed by kEnd.
struct spark_memory {
    std::vector<int32_t> tokens;
    Table table;
    int64_t at = 0, written = 0; // where the next token goes; tokens so far
    std::unordered_map<uint64_t, int64_t> known; // chunks of texts, by all tokens up to their ends: `written` then
    std::deque<std::pair<int64_t, uint64_t>> order;
};

struct spark_text {
    spark_memory *memory;
    std::vector<int32_t> tokens; // a prediction and kEnd, if there is one, then the history
    int64_t n = 0, first = 0;    // of the tokens, those that are known; where the history begins
    Table table;

    void grow(int64_t n_tokens) {
        if (n_tokens <= (int64_t)tokens.size()) return;
        tokens.resize((size_t)std::max<int64_t>(1024, n_tokens + n_tokens / 4), kEnd);
        table.allocate((int64_t)tokens.size());
        if (first) table.add(tokens.data(), 0, first - 1);
        table.add(tokens.data(), first, n);
    }

    void take(const int32_t *more, int64_t n_more) {
        grow(n + n_more);
        std::copy(more, more + n_more, tokens.begin() + n);
        if (n == first) table.part();
        for (int64_t i = n + 1; i <= n + n_more; ++i) table.note(tokens.data(), first, i);
        n += n_more;
    }

    // The place in a text, of those given from `first` on, whose run is the longest, the later one of two; its run.
    std::pair<Place, int64_t> longest(const int32_t *text, const Place *places, int first, int n_places) const {
        Place best;
        int64_t run = 0;
        for (int k = n_places - 1; k >= first; --k) {
            const int64_t at = places[k].index();
            if (!at || at == best.index()) continue;
            const int64_t r = run_of(text, at, tokens.data(), n);
            if (r > run || (r == run && r && at > best.index())) best = places[k], run = r;
        }
        return {best, run};
    }
};

extern "C" {

spark_memory *spark_memory_create(int64_t n_tokens) {
    auto *made = new (std::nothrow) spark_memory;
    if (!made) return nullptr;
    try {
        made->tokens.assign((size_t)n_tokens, kEnd);
        if (n_tokens) made->table.allocate(n_tokens);
    } catch (const std::bad_alloc &) {
        delete made;
        return nullptr;
    }
    return made;
}

void spark_memory_destroy(spark_memory *memory) { delete memory; }

int32_t spark_memory_add(spark_memory *memory, const int32_t *tokens, int64_t n) {
    auto &m = *memory;
    const int64_t room = (int64_t)m.tokens.size();
    if (room <= 2 * kLongest || n < 2) return SPARK_OK;
    try {
        while (!m.order.empty() && m.order.front().first <= m.written - room + 2 * kLongest) {
            const auto [when, key] = m.order.front();
            m.order.pop_front();
            const auto found = m.known.find(key);
            if (found != m.known.end() && found->second == when) m.known.erase(found);
        }
        std::vector<std::pair<int64_t, uint64_t>> keys; // and where the chunk ends
        uint64_t key = 0;
        int64_t there = 0; // tokens from the beginning on that are remembered
        for (int64_t start = 0; start + kChunk <= n; start += kChunk) {
            for (int64_t i = start; i < start + kChunk; ++i) key = mixed(key + (uint64_t)(uint32_t)tokens[i] * kOdd + 1);
            if (there == start && m.known.count(key)) there = start + kChunk;
            else keys.emplace_back(start + kChunk, key);
        }
        if (there == n) return SPARK_OK;
        const int64_t begin = std::max(std::max<int64_t>(0, there - kLongest), n - (room - 1));
        const int64_t length = n - begin;
        if (m.at + length + 1 > room) { // a text lies in one piece
            std::fill(m.tokens.begin() + m.at, m.tokens.end(), kEnd);
            m.written += room - m.at;
            m.at = 0;
        }
        std::copy(tokens + begin, tokens + n, m.tokens.begin() + m.at);
        m.tokens[(size_t)(m.at + length)] = kEnd;
        m.table.add(m.tokens.data(), m.at, m.at + length);
        m.at += length + 1;
        m.written += length + 1;
        for (const auto &[end, k] : keys) {
            if (end <= begin) continue; // it was cut off
            m.known[k] = m.written;
            m.order.emplace_back(m.written, k);
        }
    } catch (const std::bad_alloc &) {
        return SPARK_NO_MEMORY;
    }
    return SPARK_OK;
}

spark_text *spark_text_create(spark_memory *memory, const int32_t *prediction, int64_t n) {
    auto *made = new (std::nothrow) spark_text;
    if (!made) return nullptr;
    made->memory = memory;
    try {
        if (n) {
            made->first = made->n = n + 1;
            made->tokens.assign(prediction, prediction + n);
            made->tokens.push_back(kEnd);
            made->table.allocate(n + 1);
            made->table.add(made->tokens.data(), 0, n);
        }
    } catch (const std::bad_alloc &) {
        delete made;
        return nullptr;
    }
    return made;
}

void spark_text_destroy(spark_text *text) { delete text; }

int32_t spark_text_take(spark_text *text, const int32_t *tokens, int64_t n) {
    try {
        text->take(tokens, n);
    } catch (const std::bad_alloc &) {
        return SPARK_NO_MEMORY;
    }
    return SPARK_OK;
}

void spark_text_propose(spark_look *look) {
    spark_text *text = look->text;
    look->n = look->run = look->seen = 0;
    if (look->n_new && spark_text_take(text, look->tokens, look->n_new) != SPARK_OK) {
        look->n = -1;
        return;
    }
    const int32_t most = std::min<int32_t>(look->most, (int32_t)(sizeof look->tokens / sizeof look->tokens[0]));
    const auto &own = text->tokens;
    int shortest = 0; // of the lengths: a run that is long enough ends with one of that length
    while (shortest + 1 < kLengthCount && kLengths[shortest + 1] <= look->least) ++shortest;
    auto [found, length] = text->longest(own.data(), text->table.before, shortest, text->table.n_last);
    const int32_t *from = own.data();
    int64_t end = text->n;
    const auto &m = *text->memory;
    if (!m.tokens.empty() && length < kMostRun) {
        uint64_t h[kLengthCount];
        Place places[kLengthCount];
        const int n = hash_runs(own.data() + text->first, own.data() + text->n, h);
        for (int k = shortest; k < n; ++k) places[k] = m.table.places[k][h[k] >> m.table.shift];
        const auto [other, longer] = text->longest(m.tokens.data(), places, shortest, n);
        if (longer > length) found = other, length = longer, from = m.tokens.data(), end = (int64_t)m.tokens.size();
    }
    if (length < std::max<int64_t>(kLengths[0], look->least)) return;
    const int64_t place = found.index();
    int32_t n = 0;
    for (int64_t i = place; n < most && i < end && from[i] != kEnd; ++i) look->tokens[n++] = from[i];
    if (from == own.data() && place + n == end) // it repeats itself: what is proposed goes on so
        for (const int64_t period = end - place; n < most && period > 0; ++n) look->tokens[n] = look->tokens[n - period];
    look->n = n;
    look->run = (int32_t)length;
    look->seen = found.seen();
}

} // extern "C"
