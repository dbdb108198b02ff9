// Texts that drafts of replies are looked up in; engine/drafting/lookup.py is the caller, and says what it is for.
//
// A run of tokens is found by its hash, in a table of where runs of that length ended last. What lies there may be
// another run with the same place in the table, or what a ring has written over: whatever is found is compared.
//
// How likely a token of a draft is right is a logistic model's guess, which learns from every draft that it is told the
// outcome of. What it knows of a token is how often the contexts before it were followed by it, by counts that may be
// those of other contexts: they are guesses, too.
#include <algorithm>
#include <cmath>
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
constexpr int64_t kOrders[] = {1, 2, 4, 8}; // tokens of the contexts whose next ones are counted
constexpr int kOrderCount = 4;
constexpr int64_t kMostOrder = kOrders[kOrderCount - 1];
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

// Hashes of the runs of some lengths that end before `end`, of a text that begins at `begin`; how many there are.
template <int N>
int hash_each(const int64_t (&lengths)[N], const int32_t *begin, const int32_t *end, uint64_t *found) {
    uint64_t h = 0;
    int n = 0;
    const int64_t most = std::min<int64_t>(end - begin, lengths[N - 1]);
    for (int64_t i = 0; i < most; ++i) {
        h += ((uint64_t)(uint32_t)end[-1 - i] + 1) * factors.of[i];
        if (i + 1 == lengths[n]) found[n++] = h * kOdd;
    }
    return n;
}

int hash_runs(const int32_t *begin, const int32_t *end, uint64_t *found) {
    return hash_each(kLengths, begin, end, found);
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

// What followed a context: how often anything did, and the two tokens that did most (Misra and Gries, 1982).
struct Count {
    static constexpr int kMost = 255; // then all are halved
    uint16_t token[2] = {};
    uint8_t n[2] = {}, all = 0, check = 0; // check: of the context

    void note(uint8_t context, uint16_t next) {
        if (check != context) *this = Count(), check = context;
        if (all == kMost) all /= 2, n[0] /= 2, n[1] /= 2;
        ++all;
        for (int i = 0; i < 2; ++i)
            if (n[i] && token[i] == next) {
                ++n[i];
                return;
            }
        const int least = n[1] < n[0];
        if (n[least]) --n[least];
        else token[least] = next, n[least] = 1;
    }
    int of(uint16_t next) const { return n[0] && token[0] == next ? n[0] : n[1] && token[1] == next ? n[1] : 0; }
};

// Counts of contexts of each of kOrders, as many as there is room for.
struct Counts {
    std::vector<Count> counts[kOrderCount];
    int shift = 63;

    bool any() const { return !counts[0].empty(); }

    void allocate(int64_t n_tokens) { // half a place a token, or less than one
        int bits = 10;
        while ((int64_t)2 << bits < n_tokens) ++bits;
        for (auto &c : counts) c.assign((size_t)1 << bits, Count());
        shift = 64 - bits;
    }

    Count &of(int k, uint64_t hash) { return counts[k][hash >> shift]; }
    static uint8_t check(uint64_t hash) { return (uint8_t)(hash >> 8); }
    static uint16_t named(int32_t token) { return (uint16_t)((uint32_t)token * 0x9E3779B1u >> 16); }

    // text[i] follows what lies between text[begin] and it.
    void note(const int32_t *text, int64_t begin, int64_t i) {
        uint64_t h[kOrderCount];
        const int n = hash_each(kOrders, text + begin, text + i, h);
        for (int k = 0; k < n; ++k) of(k, h[k]).note(check(h[k]), named(text[i]));
    }
};

// What is known of a token of a draft: 1; whether it is the first; how long its run is; how that went on before, of the
// first; and of each order how often its context was followed by it, in logarithms of odds, or that it never occurred.
constexpr int kFirst = 1, kRun = 2, kSeen = 3, kOdds = 7, kUnknown = kOdds + kOrderCount, kFeatures = kUnknown + kOrderCount;
using Features = float[kFeatures];

// A logistic model of whether a token is right, that learns by AdaGrad (Duchi et al., 2011), whose sums fade.
struct Model {
    static constexpr float kRate = 0.05f, kFade = 0.999f;
    float weights[kFeatures] = {}, squares[kFeatures];
    Model() { // which knows nothing but that counts say what follows; weights fitted to sessions were no better
        std::fill(weights + kOdds, weights + kUnknown, 1.0f / kOrderCount);
        std::fill(squares, squares + kFeatures, 1.0f);
    }

    float chance(const Features &x) const {
        float z = 0;
        for (int i = 0; i < kFeatures; ++i) z += weights[i] * x[i];
        return 1.0f / (1.0f + std::exp(-std::max(-8.0f, std::min(8.0f, z))));
    }

    void learn(const Features &x, float chance, bool right) {
        for (int i = 0; i < kFeatures; ++i) {
            const float slope = (chance - (float)right) * x[i];
            squares[i] = kFade * squares[i] + (1.0f - kFade) + slope * slope;
            weights[i] -= kRate * slope / std::sqrt(squares[i]);
        }
    }
};

constexpr int kMostChances = 31; // tokens of a draft
constexpr float kLeastChance = 0.02f; // of a token and all before it to be right, below which a draft is cut
constexpr float kShrink = 0.3f; // added to counts, of a token and of all others

// A draft whose outcome is to be learned from: tokens that are to come.
struct Awaited {
    int32_t n = 0, at = 0, token[kMostChances];
    float chance[kMostChances];
    Features x[kMostChances];
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
    Counts counts;
    Model model;
    int64_t at = 0, written = 0; // where the next token goes; tokens so far
    std::unordered_map<uint64_t, int64_t> known; // chunks of texts, by all tokens up to their ends: `written` then
    std::deque<std::pair<int64_t, uint64_t>> order;

    // How many tokens of a text are remembered, from its beginning on; visit: is told the keys of all other chunks.
    template <class Visit> int64_t remembered(const int32_t *text, int64_t n, Visit visit) const {
        uint64_t key = 0;
        int64_t there = 0;
        for (int64_t start = 0; start + kChunk <= n; start += kChunk) {
            for (int64_t i = start; i < start + kChunk; ++i) key = mixed(key + (uint64_t)(uint32_t)text[i] * kOdd + 1);
            if (there == start && known.count(key)) there = start + kChunk;
            else visit(start + kChunk, key);
        }
        return there;
    }
};

struct spark_text {
    spark_memory *memory;
    std::vector<int32_t> tokens; // a prediction and kEnd, if there is one, then the history
    int64_t n = 0, first = 0;    // of the tokens, those that are known; where the history begins
    Table table;
    Counts own; // where the memory has no room for any
    Awaited awaited;

    Counts &counts() { return memory->counts.any() ? memory->counts : own; }

    void grow(int64_t n_tokens) {
        if (n_tokens <= (int64_t)tokens.size()) return;
        tokens.resize((size_t)std::max<int64_t>(1024, n_tokens + n_tokens / 4), kEnd);
        table.allocate((int64_t)tokens.size());
        if (first) table.add(tokens.data(), 0, first - 1);
        table.add(tokens.data(), first, n);
        if (memory->counts.any()) return;
        own.allocate((int64_t)tokens.size());
        for (int64_t i = first; i < n; ++i) own.note(tokens.data(), first, i);
    }

    void take(const int32_t *more, int64_t n_more) {
        grow(n + n_more);
        std::copy(more, more + n_more, tokens.begin() + n);
        int64_t uncounted = n; // a session comes again with every turn, and is counted once
        if (n == first) {
            table.part();
            if (memory->counts.any()) uncounted += memory->remembered(more, n_more, [](int64_t, uint64_t) {});
        }
        for (int64_t i = n + 1; i <= n + n_more; ++i) table.note(tokens.data(), first, i);
        for (int64_t i = uncounted; i < n + n_more; ++i) counts().note(tokens.data(), first, i);
        for (int64_t i = 0; i < n_more && awaited.at < awaited.n; ++i) learn(more[i]);
        n += n_more;
    }

    // What has come, of a draft that is awaited: nothing behind a wrong token can be learned from.
    void learn(int32_t token) {
        auto &a = awaited;
        const bool right = a.token[a.at] == token;
        memory->model.learn(a.x[a.at], a.chance[a.at], right);
        a.at = right ? a.at + 1 : a.n;
    }

    // The chances of a draft's tokens to be right with all before them, and how many have any to speak of. One draft is
    // awaited at a time, so that its later tokens are learned from, too.
    int32_t judge(const int32_t *draft, int32_t n_draft, int64_t run, int32_t seen, float *chances) {
        int32_t context[kMostOrder + kMostChances];
        const int64_t before = std::min(n - first, kMostOrder);
        std::copy(tokens.begin() + (n - before), tokens.begin() + n, context);
        const int32_t most = std::min<int32_t>(n_draft, kMostChances);
        std::copy(draft, draft + most, context + before);
        const bool free = awaited.at >= awaited.n;
        if (free) awaited.n = awaited.at = 0;
        float all = 1.0f;
        int32_t found = 0;
        while (found < most && all >= kLeastChance) {
            Features x = {1.0f};
            x[kFirst] = found == 0;
            x[kRun] = 0.25f * std::log2((float)(run + found + 1));
            if (!found) x[kSeen + seen] = 1.0f;
            uint64_t h[kOrderCount];
            const int32_t *end = context + before + found;
            const int known = hash_each(kOrders, context, end, h);
            for (int k = 0; k < known; ++k) {
                const Count &c = counts().of(k, h[k]);
                if (c.all && c.check == Counts::check(h[k])) {
                    const float good = (float)c.of(Counts::named(*end));
                    x[kOdds + k] = std::log((good + kShrink) / ((float)c.all - good + kShrink));
                } else {
                    x[kUnknown + k] = 1.0f;
                }
            }
            const float chance = memory->model.chance(x);
            if (free) {
                std::copy(x, x + kFeatures, awaited.x[found]);
                awaited.chance[found] = chance, awaited.token[found] = *end;
                awaited.n = found + 1;
            }
            chances[found++] = all *= chance;
        }
        return found;
    }

    // The place in a text, of those given, whose run is the longest, the later one of two; its run.
    std::pair<Place, int64_t> longest(const int32_t *text, const Place *places, int n_places) const {
        Place best;
        int64_t run = 0;
        for (int k = n_places - 1; k >= 0; --k) {
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
        if (n_tokens) made->table.allocate(n_tokens), made->counts.allocate(n_tokens);
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
        const int64_t there = m.remembered(tokens, n, [&](int64_t end, uint64_t key) { keys.emplace_back(end, key); });
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
    look->n = look->n_chances = look->run = look->seen = 0;
    if (look->n_new && spark_text_take(text, look->tokens, look->n_new) != SPARK_OK) {
        look->n = -1;
        return;
    }
    const int32_t most = std::min<int32_t>(look->most, (int32_t)(sizeof look->tokens / sizeof look->tokens[0]));
    const auto &own = text->tokens;
    auto [found, length] = text->longest(own.data(), text->table.before, text->table.n_last);
    const int32_t *from = own.data();
    int64_t end = text->n;
    const auto &m = *text->memory;
    if (!m.tokens.empty() && length < kMostRun) {
        uint64_t h[kLengthCount];
        Place places[kLengthCount];
        const int n = hash_runs(own.data() + text->first, own.data() + text->n, h);
        for (int k = 0; k < n; ++k) places[k] = m.table.places[k][h[k] >> m.table.shift];
        const auto [other, longer] = text->longest(m.tokens.data(), places, n);
        if (longer > length) found = other, length = longer, from = m.tokens.data(), end = (int64_t)m.tokens.size();
    }
    if (length < kLengths[0]) return;
    const int64_t place = found.index();
    int32_t n = 0;
    for (int64_t i = place; n < most && i < end && from[i] != kEnd; ++i) look->tokens[n++] = from[i];
    if (from == own.data() && place + n == end) // it repeats itself: what is proposed goes on so
        for (const int64_t period = end - place; n < most && period > 0; ++n) look->tokens[n] = look->tokens[n - period];
    look->run = (int32_t)length;
    look->seen = found.seen();
    look->n_chances = text->judge(look->tokens, n, length, found.seen(), look->chances);
    float expected = 0;
    for (int32_t i = 0; i < look->n_chances; ++i) expected += look->chances[i];
    look->n = expected < look->least ? 0 : n;
}

} // extern "C"
