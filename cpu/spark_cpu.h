/* The C interface of the CPU kernels; engine/ops/cpu.py is its only caller.
 *
 * Every operation has a twin of the same name in engine/ops/reference.py and computes its bits
 * (docs/arithmetic.md). Arrays are dense and row-major; the caller has checked types and shapes.
 * Indices inside arrays (tokens, slots, blocks, experts) are checked here, before anything is
 * written: an operation returns SPARK_OK, or SPARK_BAD_INDEX and leaves its outputs alone.
 *
 * A workspace belongs to one thread at a time. Two workspaces may be used side by side.
 */
#ifndef SPARK_CPU_H
#define SPARK_CPU_H

#include <stdint.h>

#if defined(__GNUC__)
#define SPARK_API __attribute__((visibility("default")))
#else
#define SPARK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPARK_CPU_ABI 1 /* raised with every incompatible change; the binding compares it */

enum { SPARK_OK = 0, SPARK_BAD_INDEX = 1 };

/* Instruction sets, worst first. */
enum { SPARK_ISA_PORTABLE = 0, SPARK_ISA_AVX2 = 1, SPARK_ISA_AVX512 = 2, SPARK_ISA_AVX512_VNNI = 3 };

/* Types of weights: the numbers of the GGUF format. */
enum {
    SPARK_F32 = 0,
    SPARK_F16 = 1,
    SPARK_Q4_0 = 2,
    SPARK_Q8_0 = 8,
    SPARK_Q4_K = 12,
    SPARK_Q5_K = 13,
    SPARK_Q6_K = 14,
    SPARK_IQ4_XS = 23,
    SPARK_BF16 = 30
};

typedef struct spark_workspace spark_workspace;

/* engine.ops.Limits */
typedef struct spark_limits {
    int64_t max_tokens, n_embd, n_head_dim, n_ff, n_vocab, n_expert, n_expert_used;
} spark_limits;

/* A weight matrix [rows, cols]. */
typedef struct spark_matrix {
    const void *data;
    int64_t rows, cols;
    int64_t type;
} spark_matrix;

/* engine.ops.KVLayer; the scales are NULL for f16, and k, v are int8 where they are not. */
typedef struct spark_kv {
    void *k, *v;
    uint16_t *k_scale, *v_scale;
    int64_t n_slots, n_head_kv, head_dim;
} spark_kv;

/* engine.ops.Experts */
typedef struct spark_experts {
    int64_t type[3]; /* gate, up, down */
    int64_t part_bytes[3];
    int64_t n_embd, n_ff, n_expert, n_slots;
    const uint64_t *expert_ptr; /* [n_expert][3] */
    const uint64_t *home_ptr;   /* [n_expert][3] */
    const uint64_t *slot_ptr;   /* [n_slots][3] */
    int64_t poison;
} spark_experts;

/* engine.policy.SlotState */
typedef struct spark_slots {
    const int32_t *slot_begin;
    int32_t *slot_of, *expert_of;
    int64_t *score;
    const uint8_t *pinned;
    int64_t *clock, *counts, *hits, *misses;
    uint64_t *expert_ptr;
    const uint64_t *home_ptr, *slot_ptr;
    int64_t n_layer, n_expert;
} spark_slots;

SPARK_API int32_t spark_abi(void);
/* The best instruction set of this machine that the library was built with. */
SPARK_API int32_t spark_best_isa(void);

/* NULL when memory or threads run out. threads >= 1, the calling thread among them. */
SPARK_API spark_workspace *spark_workspace_create(const spark_limits *limits, int32_t threads, int32_t isa);
SPARK_API void spark_workspace_destroy(spark_workspace *ws);

/* y [T, w->rows] = x [T, w->cols] against the rows of w. */
SPARK_API int32_t spark_product(spark_workspace *ws, const spark_matrix *w, const float *x, int64_t T, float *y);

SPARK_API int32_t spark_embed(spark_workspace *ws, const spark_matrix *table, const int32_t *tokens, int64_t T, float *x);

SPARK_API int32_t spark_attention_input(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                                        const spark_matrix *wq, const spark_matrix *wk, const spark_matrix *wv,
                                        const float *q_norm, const float *k_norm, const float *rope,
                                        int64_t n_positions, int64_t n_rot, const int32_t *positions,
                                        const spark_kv *kv, const int32_t *slots, float *q);

SPARK_API int32_t spark_attention(spark_workspace *ws, const float *q, int64_t T, int64_t n_head, const spark_kv *kv,
                                  const int32_t *block_table, int64_t n_sequence, int64_t max_blocks,
                                  const int32_t *sequence, const int32_t *positions, float scale, float *out);

SPARK_API int32_t spark_attention_output(spark_workspace *ws, const float *attended, int64_t T, const spark_matrix *wo,
                                         float *x);

SPARK_API int32_t spark_router(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                               const spark_matrix *gate, float *h, float *logits);

SPARK_API int32_t spark_route(spark_workspace *ws, const float *logits, int64_t T, int64_t n_used, int32_t renormalize,
                              const spark_slots *state, int64_t layer, const uint8_t *counted, int64_t gain,
                              int64_t cap, int32_t *experts, float *weights, int32_t *fetch_rows, int32_t *fetch_count);

SPARK_API int32_t spark_expert_ffn(spark_workspace *ws, const float *h, int64_t T, int64_t n_used,
                                   const int32_t *experts, const float *weights, const spark_experts *bank,
                                   const int32_t *fetch_rows, const int32_t *fetch_count, float *x);

SPARK_API int32_t spark_head(spark_workspace *ws, const float *x, int64_t T, const int32_t *rows, int64_t n_rows,
                             const float *norm, float eps, const spark_matrix *output, float *logits);

/* Pieces of the arithmetic, for tests: exp of n values, and a plain parallel read of n bytes (the
 * benchmark's floor), which returns a sum so that the read cannot be dropped. */
SPARK_API void spark_exp(spark_workspace *ws, const float *x, int64_t n, float *y);
SPARK_API uint64_t spark_read(spark_workspace *ws, const void *data, int64_t n_bytes);

#ifdef __cplusplus
}
#endif
#endif
