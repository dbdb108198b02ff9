// Scratch memory and threads for steps within limits, allocated once.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"
#include "pool.h"

namespace spark {

// Zeroed memory at a multiple of 64 bytes; pages that are never used are never touched.
template <class T> class Buffer {
  public:
    explicit Buffer(int64_t n) : memory_(std::calloc(1, size_t(n) * sizeof(T) + 64)) {
        if (!memory_)
            throw std::bad_alloc();
        data_ = reinterpret_cast<T *>(padded(int64_t(reinterpret_cast<uintptr_t>(memory_.get())), 64));
    }
    T *get() const { return data_; }

  private:
    struct Free {
        void operator()(void *p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory_;
    T *data_;
};

constexpr int64_t kChunkRows = 32; // of experts, that one thread takes at a time; a block of activations
constexpr int64_t kGroupTokens = 32;

inline int64_t supers(int64_t cols) { return (cols + kSuper - 1) / kSuper; }

struct Group { // pairs (token, rank) of one expert: [first, last) of Workspace::pair_token
    int64_t expert, first, last;
};

} // namespace spark

struct spark_workspace {
    spark_workspace(const spark_limits &limits, int threads, const spark::Kernels &kernels);

    spark_limits limits;
    const spark::Kernels &kernels;
    spark::Pool pool;

    int64_t widest; // of n_embd, n_head_dim, n_ff and n_z
    spark::Buffer<spark::Activations> activations; // [T][supers(widest)]
    spark::Buffer<float> normed;                   // [T][widest]
    spark::Buffer<float> keys, values;             // [T][n_head_dim]
    spark::Buffer<float> row_scale;                // [T]
    spark::Buffer<float> convolved;                // [T][the larger of n_mixed and n_embd]
    spark::Buffer<float> decays, rates;            // [T][n_head_v]

    // Between the halves of an FFN, for weights of block types and of float types: an expert's [T * A][supers(n_ff_exp)]
    // and [T * A][n_ff_exp], by pair, or a dense one's [T][supers(n_ff)] and [T][n_ff].
    spark::Buffer<spark::Activations> hidden;
    spark::Buffer<float> plain_hidden;
    spark::Buffer<int32_t> pair_token, place_of_pair; // [T * A]
    spark::Buffer<spark::Group> groups;               // [E]
    spark::Buffer<int64_t> uses;                      // [E], zero between operations
    spark::Buffer<int32_t> order;                     // [E]
    spark::Buffer<int64_t> tiles;                     // [T + 1], of attention

    int64_t expert_floats, attention_floats; // of scratch, for each thread
    spark::Buffer<float> expert_scratch, attention_scratch;

    // Rows 0..n of something, in chunks of a multiple of 16 rows: long enough that claiming one costs little
    // and that a thread reads ahead mostly for itself, short enough that threads end together.
    template <class Work> void rows(int64_t n, double row_ns, Work work) {
        const double total_ns = double(n) * row_ns, fair_ns = total_ns / (16 * pool.threads());
        const double chunk_ns = fair_ns < 8e3 ? 8e3 : fair_ns > 2e5 ? 2e5 : fair_ns;
        const int64_t share = spark::padded((n + pool.threads() - 1) / pool.threads(), 16);
        int64_t chunk = spark::padded(int64_t(chunk_ns / row_ns) + 1, 16);
        if (chunk > share)
            chunk = total_ns < 2e3 ? n : share;
        if (n > 0)
            pool.run((n + chunk - 1) / chunk, [&](int64_t i, int thread) {
                work(i * chunk, i * chunk + chunk < n ? i * chunk + chunk : n, thread);
            });
    }
};

namespace spark {

// Whether the types of all matrices that are there have kernels: the first question of every operation.
template <class... Matrix> bool known(const Matrix *...m) { return ((!m || is_known(m->type)) && ...); }

// The same of a matrix whose activations are never quantized: a router's, a shared gate.
inline bool known_float(const spark_matrix *m) { return !m || (is_known(m->type) && is_float(m->type)); }

inline Weights weights_of(const spark_matrix &m) {
    return {static_cast<const uint8_t *>(m.data), m.rows, m.cols, row_bytes(m.type, m.cols), m.type, m.scale};
}

// A guess of what a row of a product takes on one thread; it only shapes chunks.
inline double row_ns(const Weights &w, int64_t n) { return 1.0 + double(w.row_bytes) / 12 + double(n * w.cols) / 64; }

// least: -1 where that is a block or slot that is not there.
inline bool out_of_range(const int32_t *index, int64_t n, int64_t end, int64_t least = 0) {
    bool bad = false;
    for (int64_t i = 0; i < n; i++)
        bad |= index[i] < least || index[i] >= end;
    return bad;
}

} // namespace spark
