// What an instruction set offers to the operations: one table of functions, the same bits in each.
//
// kernels.cpp is compiled once for every instruction set; choose_kernels picks a table at run time.
// Inputs of products are laid out as the vector code wants them ("quantized" below).
#pragma once

#include <cstddef>
#include <cstdint>

#include "spark_cpu.h"

namespace spark {

constexpr int kBlock = 32;       // elements that share a scale
constexpr int kSuper = 256;      // elements of a panel of weights, eight blocks
constexpr int kLanes = 32;       // of every reduction (docs/arithmetic.md)
constexpr int kKVBlock = 64;     // positions of a KV block
constexpr int kMaxHeadDim = 512; // of attention's scratch memory
constexpr int kTailBlocks = 3; // full blocks that a row reads anyway, before the one that it lies in

// Eight blocks of activations in 8 bits. Block 2g+p is column g of half p. A register of weights holds
// dword i (bytes 4i..4i+3) of four blocks of one parity, so q has the same order.
struct alignas(32) Activations {
    int8_t q[2][8][16];          // [p][i][4g + byte]
    float d[2][4];               // scales
    float sum[2][4];             // of each block's q
    int32_t minus_sum[2][4];     // the same, negated
    int32_t minus_half[2][2][4]; // [half of 16][p][g]: -32 times the sum of that half's q
};
static_assert(sizeof(Activations) == 416);

struct Inputs {
    const Activations *quantized; // [T][supers]
    const float *plain;           // [T][cols], for float weights
    int64_t supers, cols;
};

struct Weights {
    const uint8_t *data;
    int64_t rows, cols, row_bytes;
    int64_t type;
    float scale = 1.0f;            // of the products
    const uint8_t *then = nullptr; // what the thread reads after the rows of a call, if it is known
};

// Scores and values of a group of query heads that share one KV head, for a few tokens of a sequence.
struct AttentionTile {
    const float *q;         // [T][n_head][head_dim]
    float *out;             // [T][n_head][head_dim]
    const int32_t *table;   // physical block of each logical block
    const int32_t *position; // [T]
    const spark_kv *kv;
    int64_t first_token, last_token; // [first, last) of the step
    int64_t first_head, last_head;   // [first, last), all reading kv_head
    int64_t n_head, kv_head;
    int64_t window;    // last positions that a token sees; 0: all
    const float *gate; // [T][n_head], or with [head_dim] more; may be null
    bool gate_by_head;
    int32_t gate_kind;
    float scale;
    float *scratch; // attention_scratch_floats(head_dim, queries)
    const uint8_t *chosen; // [T][kv heads][max_blocks], the blocks that are read; null: all
    int64_t max_blocks;
    const float *left; // [T][n_head][2], of those that are not: the largest score of a key, and the masses beside it
    float *missed;     // [T][n_head], the share of mass that they have, as estimated
};

// Where the parts of a sketch lie, in bytes: codes from 0 on, [words][64] of 32 bits (engine/ops/sketches.py).
struct SketchLayout {
    int64_t kept, words, mask, base, step, bytes; // channels that have codes, 16 in a word

    explicit SketchLayout(int64_t head_dim) {
        kept = head_dim / 2;
        words = (kept + 15) / 16;
        mask = words * kKVBlock * 4;
        base = mask + (head_dim + 31) / 32 * 4;
        step = base + 2 * head_dim;
        bytes = (step + 2 * kept + 3) / 4 * 4;
    }
};

// A row of a step and a KV head: which blocks its queries read, by the sketches of the blocks' keys.
struct RecallRow {
    const float *q;          // [heads][head_dim]
    const uint8_t *sketches; // of block b from b * block_bytes on
    const int32_t *blocks;   // of each logical block, -1: there is none
    const uint8_t *keep;     // by logical block
    int64_t heads, head_dim, block_bytes;
    int64_t width, behind, last; // of tables; blocks that have sketches; the block that the row lies in
    int64_t most;                // that are read of those that need not be; -1: all
    int64_t leave;               // units of mass that may be left out; -1: it does not matter how much
    float scale;
    uint8_t *chosen; // [width]
    float *left;     // [heads][2]
    int32_t *read;   // how many blocks
    float *mass;     // [heads][2][width], scratch: of blocks; tops and sums of chunks, and tops of a chunk's blocks
    int32_t *score;  // [width], scratch
};

constexpr int64_t kTileQueries = 64; // tokens times heads of an AttentionTile

// The first position that a token at `position` sees.
static inline int64_t window_begin(int64_t position, int64_t window) {
    return window && position + 1 > window ? position + 1 - window : 0;
}

constexpr int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int64_t attention_scratch_floats(int64_t head_dim) {
    const int64_t width = padded(head_dim, 16);
    return 2 * kKVBlock * width + kTileQueries * (2 * width + 32) + 2 * kKVBlock;
}

struct Kernels {
    // out[i * stride + r - first] = w.scale times row r of w against activation row index[i] (i without an index).
    void (*product)(const Weights &w, int64_t first, int64_t last, const Inputs &in, const int32_t *index, int64_t n,
                    float *out, int64_t stride);
    void (*quantize)(const float *x, int64_t n, Activations *row); // n a multiple of 32
    void (*quantize_block)(const float *x, int64_t block, Activations *row);
    // Activations that have 8 bits already, q [n] and d [n / 32]; and a block as it was
    void (*arrange)(const int8_t *q, const float *d, int64_t n, Activations *row);
    void (*block_of)(const Activations *row, int64_t block, int8_t *q, float *d);
    void (*rms_norm)(const float *x, const float *weight, int64_t n, float eps, float *y);
    void (*rotate)(float *x, const float *cosines, const float *sines, int64_t half);
    void (*store_f16)(const float *x, int64_t n, uint16_t *y);
    void (*store_q8)(const float *x, int64_t n, int8_t *q, uint16_t *scale);  // n a multiple of 32
    void (*store_q4)(const float *x, int64_t n, uint8_t *q, uint16_t *scale); // n a multiple of 32
    void (*silu_mul)(const float *gate, const float *up, int64_t n, float *z);
    void (*gelu_mul)(const float *gate, const float *up, int64_t n, float *z);
    void (*add)(float *x, const float *y, int64_t n);
    void (*scale)(float *x, float factor, int64_t n); // x[i] *= factor
    void (*sigmoid)(const float *x, int64_t n, float *y);
    void (*softcap)(float *x, float cap, int64_t n); // x[i] = cap * tanh(x[i] / cap)
    // x[i] += fold over a of w[a] * y[row[a]][i], or becomes it
    void (*fold_experts)(float *x, const float *w, const float *y, const int32_t *row, int64_t stride, int64_t n_used,
                         int64_t n, bool add);
    void (*exp)(const float *x, float minus, int64_t n, float *y); // exp(x - minus)
    float (*sum)(const float *x, int64_t n);
    void (*attend)(const AttentionTile &tile);
    void (*summarize)(const spark_kv &kv, int64_t place, int64_t kv_head, uint8_t *sketch);
    void (*choose)(const RecallRow &row);
    // y[c] = silu of the sum of tap[j][c] * weights[c * kernel + j], n channels
    void (*convolve)(const float *const *tap, const float *weights, int64_t kernel, int64_t n, float *y);
    // x becomes x / |x|, times `factor`; the square of the length is increased by eps
    void (*unit)(float *x, int64_t n, float eps, float factor);
    void (*delta_gates)(const float *alpha, const float *dt_bias, const float *a, int64_t n, float *decay);
    // A token of the delta rule for d_v rows of the state, [d_v][d_k]
    void (*delta_step)(float *state, const float *q, const float *k, const float *v, int64_t d_k, int64_t d_v,
                       float decay, float rate, float *out);
};

extern const Kernels kernels_portable;
#ifdef SPARK_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512vnni;
#endif

int best_isa();
const Kernels *choose_kernels(int isa); // nullptr: this machine or this build lacks it

// A record of block_types.h. Internal linkage all along, as kernels.cpp asks for.
#define SPARK_NAME(name) name,
enum class Kind { BLOCK_KINDS(SPARK_NAME) };
#undef SPARK_NAME

struct BlockType {
    Kind kind;
    int elements, bytes;
};

// Ends the process. The operations refuse such a type before anything asks for its record (`known`, workspace.h).
[[noreturn]] void no_such_type(int64_t type);

#define SPARK_CASE(name, id, elements, bytes, kind, ...) case id: return {Kind::kind, elements, bytes};
static constexpr BlockType block_type(int64_t type) {
    switch (type) { BLOCK_TYPES(SPARK_CASE) }
    no_such_type(type);
}
#undef SPARK_CASE

#define SPARK_CASE(name, id, ...) case id:
static constexpr bool is_known(int64_t type) {
    switch (type) { BLOCK_TYPES(SPARK_CASE) return true; }
    return false;
}
#undef SPARK_CASE

static constexpr bool is_float(int64_t type) { return block_type(type).kind == Kind::PLAIN; }
static constexpr int64_t row_bytes(int64_t type, int64_t cols) {
    return cols / block_type(type).elements * block_type(type).bytes;
}

void dequantize_row(int64_t type, const uint8_t *row, int64_t cols, float *y);

} // namespace spark
