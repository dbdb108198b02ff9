/* The C interface of the CPU kernels; engine/ops/cpu.py is its caller (of spark_simulate and
 * spark_residents, engine/placing/simulate.py; of texts, engine/drafting/lookup.py; of jobs,
 * engine/ops/jobs.py).
 *
 * Every operation has a twin of the same name in engine/ops/reference.py and computes its bits
 * (docs/arithmetic.md). Arrays are dense and row-major; the caller has checked types and shapes.
 * Indices inside arrays (tokens, slots, blocks, experts) and types of weights are checked here, before anything
 * is written: an operation returns SPARK_OK, or SPARK_BAD_INDEX or SPARK_BAD_TYPE and leaves its outputs alone.
 *
 * A workspace belongs to one thread at a time. Two workspaces may be used side by side.
 */
#ifndef SPARK_CPU_H
#define SPARK_CPU_H

#include <stdint.h>

#include "block_types.h"
#include "expert_job.h"

#if defined(__GNUC__)
#define SPARK_API __attribute__((visibility("default")))
#else
#define SPARK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPARK_CPU_ABI 13 /* raised with every incompatible change; the binding compares it */

enum { SPARK_OK = 0, SPARK_BAD_INDEX = 1, SPARK_BAD_TYPE = 2, SPARK_NO_MEMORY = 3 };

enum { SPARK_SILU = 0, SPARK_GELU = 1 };
enum { SPARK_BY_SOFTMAX = 0, SPARK_BY_SIGMOID = 1 }; /* scores of a router */

/* Instruction sets, worst first. */
enum { SPARK_ISA_PORTABLE = 0, SPARK_ISA_AVX2 = 1, SPARK_ISA_AVX512 = 2, SPARK_ISA_AVX512_VNNI = 3 };

/* Types of weights, SPARK_Q4_K and so on: the numbers of the GGUF format. */
#define SPARK_TYPE(name, id, ...) SPARK_##name = id,
enum { BLOCK_TYPES(SPARK_TYPE) };
#undef SPARK_TYPE

/* What a gate goes through. */
enum { SPARK_GATE_SOFTPLUS = 0, SPARK_GATE_SIGMOID = 1 };

typedef struct spark_workspace spark_workspace;

/* engine.ops.Limits */
typedef struct spark_limits {
    int64_t max_tokens, n_embd, n_head_dim, n_ff, n_vocab, n_expert, n_expert_used, n_ff_exp;
    int64_t n_mixed, n_z, n_head_v;
} spark_limits;

/* A weight matrix [rows, cols]; its products are multiplied by `scale`. */
typedef struct spark_matrix {
    const void *data;
    int64_t rows, cols;
    int64_t type;
    float scale;
} spark_matrix;

enum { SPARK_KV_F16 = 0, SPARK_KV_Q8_0 = 1, SPARK_KV_Q4_0 = 2 }; /* in the order of engine/ground/kv_types.py */

/* engine.ops.KVLayer; the scales are NULL for f16. */
typedef struct spark_kv {
    void *k, *v;
    uint16_t *k_scale, *v_scale;
    int64_t n_slots, n_head_kv, head_dim;
    int64_t k_type, v_type;
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
    int64_t activation;
    const float *gate_scale; /* [n_expert] or NULL */
} spark_experts;

/* engine.ops.Gating; bias and expert_scale [n_expert] or NULL */
typedef struct spark_gating {
    int64_t kind, renormalize;
    const float *bias, *expert_scale;
    float scale;
} spark_gating;

/* engine.ops.DeltaLayer: conv [n_states, kernel - 1, n_mixed], state [n_states, n_head_v, d_v, d_k] */
typedef struct spark_delta_layer {
    float *conv, *state;
    int64_t n_states, kernel, n_mixed, n_head_v, d_v, d_k;
} spark_delta_layer;

/* engine.placing.policy.SlotState */
typedef struct spark_slots {
    const int32_t *slot_begin;
    int32_t *slot_of, *expert_of;
    int64_t *heat;
    const uint8_t *pinned;
    int64_t *clock, *counts, *hits, *misses;
    uint64_t *expert_ptr;
    const uint64_t *home_ptr, *slot_ptr;
    int64_t n_layer, n_expert;
} spark_slots;

SPARK_API int32_t spark_abi(void);
/* The records of block_types.h that the library was built with: a line each, the fields with ", " between. */
SPARK_API const char *spark_block_types(void);
/* The best instruction set of this machine that the library was built with. */
SPARK_API int32_t spark_best_isa(void);

/* NULL when memory or threads run out. threads >= 1, the calling thread among them. */
SPARK_API spark_workspace *spark_workspace_create(const spark_limits *limits, int32_t threads, int32_t isa);
SPARK_API void spark_workspace_destroy(spark_workspace *ws);

/* y [T, w->rows] = x [T, w->cols] against the rows of w. */
SPARK_API int32_t spark_product(spark_workspace *ws, const spark_matrix *w, const float *x, int64_t T, float *y);

SPARK_API int32_t spark_embed(spark_workspace *ws, const spark_matrix *table, const int32_t *tokens, int64_t T, float *x,
                              float scale);

SPARK_API int32_t spark_norm(spark_workspace *ws, const float *x, int64_t T, int64_t cols, const float *norm, float eps,
                             float *out);

SPARK_API int32_t spark_add_norm(spark_workspace *ws, const float *y, int64_t T, int64_t cols, const float *norm,
                                 float eps, float *x, float scale);

/* wk and wv, or wv alone, may be NULL, as may the norms, and gate with gate_out. */
SPARK_API int32_t spark_attention_input(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                                        const spark_matrix *wq, const spark_matrix *wk, const spark_matrix *wv,
                                        const float *q_norm, const float *k_norm, const float *v_norm,
                                        const float *rope, int64_t n_positions, int64_t n_rot,
                                        const int32_t *positions, const spark_kv *kv, const int32_t *slots, float *q,
                                        int64_t head_dim, const spark_matrix *gate, float *gate_out);

/* window: last positions that a token sees, 0 for all. gate [T, n_head], or [T, n_head, head_dim] unless
 * gate_by_head, or NULL. chosen, left: as spark_choose wrote them, or NULL; then missed [T, n_head] is written. */
SPARK_API int32_t spark_attention(spark_workspace *ws, const float *q, int64_t T, int64_t n_head, const spark_kv *kv,
                                  const int32_t *block_table, int64_t n_sequence, int64_t max_blocks,
                                  const int32_t *sequence, const int32_t *positions, float scale, float *out,
                                  int64_t window, const float *gate, int32_t gate_by_head, int32_t gate_kind,
                                  const uint8_t *chosen, const float *left, float *missed);

/* sketches [n_blocks, n_head_kv, bytes of engine/ops/sketches.py]: those of blocks[i] from the keys at places[i], i < n. */
SPARK_API int32_t spark_summarize(spark_workspace *ws, const spark_kv *kv, const int32_t *places, const int32_t *blocks,
                                  int64_t n, int64_t n_blocks, uint8_t *sketches);

/* blocks, keep [n_sequence, width]; most, leave [T]. chosen [T, n_head_kv, width], left [T, n_head, 2], read
 * [T, n_head_kv]; masses [T, n_head, 2, width] and scores [T, n_head_kv, width] are scratch. */
SPARK_API int32_t spark_choose(spark_workspace *ws, const float *q, int64_t T, int64_t n_head, int64_t n_head_kv,
                               int64_t head_dim, const uint8_t *sketches, int64_t n_blocks, const int32_t *blocks,
                               int64_t n_sequence, int64_t width, const int32_t *sequence, const int32_t *positions,
                               const int32_t *most, const int32_t *leave, const uint8_t *keep, float scale,
                               uint8_t *chosen, float *left, int32_t *read, float *masses, float *scores);

/* x += wo @ attended, or x = it unless `add`. */
SPARK_API int32_t spark_attention_output(spark_workspace *ws, const float *attended, int64_t T, const spark_matrix *wo,
                                         float *x, int32_t add);

SPARK_API int32_t spark_router(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                               const spark_matrix *gate, float *h, float *logits);

SPARK_API int32_t spark_route(spark_workspace *ws, const float *logits, int64_t T, int64_t n_used,
                              const spark_gating *gating, const spark_slots *state, int64_t layer, const uint8_t *counted,
                              int64_t memory, int32_t *experts, float *weights, int32_t *fetch_rows,
                              int32_t *fetch_count);

SPARK_API int32_t spark_expert_ffn(spark_workspace *ws, const float *h, int64_t T, int64_t n_used,
                                   const int32_t *experts, const float *weights, const spark_experts *bank,
                                   const int32_t *fetch_rows, const int32_t *fetch_count, float *x, int32_t add);

/* shared_gate: [1, D] or NULL */
SPARK_API int32_t spark_dense_ffn(spark_workspace *ws, const float *h, int64_t T, const spark_matrix *gate,
                                  const spark_matrix *up, const spark_matrix *down, const spark_matrix *shared_gate,
                                  int32_t activation, float *x, int32_t add);

SPARK_API int32_t spark_head(spark_workspace *ws, const float *x, int64_t T, const int32_t *rows, int64_t n_rows,
                             const float *norm, float eps, const spark_matrix *output, float *logits, float softcap);

SPARK_API int32_t spark_delta_input(spark_workspace *ws, const float *x, int64_t T, const float *norm, float eps,
                                    const spark_matrix *w_qkv, const spark_matrix *w_z, const spark_matrix *w_beta,
                                    const spark_matrix *w_alpha, float *mixed, float *z, float *beta, float *alpha);

/* conv [C, kernel]; states [n_sequence, 2]. The slots of `layer` are checked for the sequences of the step. */
SPARK_API int32_t spark_delta(spark_workspace *ws, const float *mixed, int64_t T, const float *beta, const float *alpha,
                              const float *conv, const float *dt_bias, const float *a, float eps,
                              const spark_delta_layer *layer, const int32_t *states, int64_t n_sequence,
                              const int32_t *sequence, const int32_t *positions, const int32_t *slots, float *out);

/* y, z [T, w_out->cols], norm [d_v] */
SPARK_API int32_t spark_delta_output(spark_workspace *ws, const float *y, int64_t T, const float *z, const float *norm,
                                     int64_t d_v, float eps, const spark_matrix *w_out, float *x);

/* Operations are called again. spark_operation: the number of one by its name, -1 where it is none. spark_repeat: n of
 * them, operations [n], with the arguments behind the workspace in `words`, one after the other: an address, an integer, or
 * the bits of a float. It stops at the first that does not return SPARK_OK and returns what that did; done: how many did. */
SPARK_API int64_t spark_operation(const char *name);
SPARK_API int32_t spark_repeat(spark_workspace *ws, const int64_t *operations, int64_t n, const uint64_t *words,
                               int64_t *done);

/* Pieces of the arithmetic, for tests: exp of n values, and a plain parallel read of n bytes (the
 * benchmark's floor), which returns a sum so that the read cannot be dropped. */
SPARK_API void spark_exp(spark_workspace *ws, const float *x, int64_t n, float *y);
SPARK_API uint64_t spark_read(spark_workspace *ws, const void *data, int64_t n_bytes);

/* One layer's slots on recorded routing; needs no workspace. experts [T, n_used]; spans [n_spans, 3], in order, are begin,
 * end and whether generated: a run of generated tokens, or one prefill step. held [n_slots]: the experts at the start, -1 =
 * empty; the first n_pinned slots are pinned. misses, moves [n_groups]: of generated tokens, added to at group[t], t < T. */
SPARK_API int32_t spark_simulate(const uint16_t *experts, int64_t T, int64_t n_used, int64_t n_expert,
                                 const int64_t *spans, int64_t n_spans, const int32_t *group, int64_t n_groups,
                                 const int32_t *held, int64_t n_slots, int64_t n_pinned, int64_t memory,
                                 int64_t *misses, int64_t *moves);

/* The same, to say which experts were resident when the step of a token began: resident [n_rows, n_expert], 1 or 0, at
 * row[t], t < T; a row of -1 is not asked for. */
SPARK_API int32_t spark_residents(const uint16_t *experts, int64_t T, int64_t n_used, int64_t n_expert,
                                  const int64_t *spans, int64_t n_spans, const int32_t *held, int64_t n_slots,
                                  int64_t n_pinned, int64_t memory, const int64_t *row, int64_t n_rows, uint8_t *resident);

/* Texts that drafts are looked up in (engine/drafting/lookup.py): a memory of earlier ones, a ring of n_tokens, and those that
 * grow, each with a prediction of n tokens ahead of it. NULL where memory runs out. A memory outlives its texts.
 * spark_text_propose: takes in what is new, and finds at most `most` tokens that may follow the text. */
typedef struct spark_memory spark_memory;
typedef struct spark_text spark_text;

/* How a run of tokens went on where it was found, and where it was before: it was there once; otherwise than before; as
 * before; as before, twice in a row or more often. */
enum { SPARK_ONCE, SPARK_OTHER, SPARK_SAME, SPARK_OFTEN };

/* n_new: of `tokens`, those that are new behind the text, 64 at most. least: of a draft's tokens, how many must be expected
 * to be right for anybody to want it. n: how many `tokens` were found, -1 where memory has run out; run: how many tokens at
 * the end of the text equal those ahead of the place that they were found at; seen: SPARK_ONCE, ...; chances: of the first
 * n_chances of the tokens to be right, with all before them. */
typedef struct spark_look {
    spark_text *text;
    int32_t n_new, most, n, run, seen, n_chances;
    float least;
    int32_t tokens[64];
    float chances[31];
} spark_look;

SPARK_API spark_memory *spark_memory_create(int64_t n_tokens);
SPARK_API void spark_memory_destroy(spark_memory *memory);
SPARK_API int32_t spark_memory_add(spark_memory *memory, const int32_t *tokens, int64_t n);
SPARK_API spark_text *spark_text_create(spark_memory *memory, const int32_t *prediction, int64_t n);
SPARK_API void spark_text_destroy(spark_text *text);
SPARK_API int32_t spark_text_take(spark_text *text, const int32_t *tokens, int64_t n);
SPARK_API void spark_text_propose(spark_look *look);

/* Threads that do the jobs of a ring of records (expert_job.h), each on a core of its own. They look at the next record and
 * at the jobs that are open; who has seen nothing for spin_ns sleeps until a job is opened or spark_jobs_wake, but for one,
 * which looks every nap_ns, less and less often. So who is about to post wakes them first. The ring, and what its jobs
 * point to, outlive the pool. Nobody but the ring's owner and the pool writes to it. */
typedef struct spark_jobs spark_jobs;

typedef struct spark_bank { /* of experts that are alike */
    int64_t type[3];       /* gate, up, down */
    int64_t n_embd, n_ff, activation;
} spark_bank;

typedef struct spark_jobs_plan {
    spark_job *ring; /* zeros at first */
    int64_t n_records;
    const spark_bank *banks;
    int64_t n_banks;
    const int32_t *cores; /* [threads], -1: not bound to one */
    int64_t threads, isa, max_tokens, spin_ns, nap_ns;
} spark_jobs_plan;

/* Counts of spark_jobs_counts: jobs done; declined, as they were taken back or the pool drains; declined, as a field was
 * not what it may be; threads that are bound to their core, that sleep, that are held. */
enum {
    SPARK_JOBS_DONE, SPARK_JOBS_DECLINED, SPARK_JOBS_REFUSED,
    SPARK_JOBS_BOUND, SPARK_JOBS_ASLEEP, SPARK_JOBS_HELD, SPARK_JOBS_COUNTS
};

/* Where spark_jobs_hold stops threads: before a job is claimed, claimed and not looked at, in the middle of its items. */
enum { SPARK_HOLD_NOWHERE, SPARK_HOLD_BEFORE_CLAIM, SPARK_HOLD_CLAIMED, SPARK_HOLD_ITEM };

/* What the threads are called where the system names them (/proc/PID/task/TID/comm). */
#define SPARK_JOBS_THREAD "spark-experts"

/* NULL when memory or threads run out, or the plan has what there is not. */
SPARK_API spark_jobs *spark_jobs_create(const spark_jobs_plan *plan);
/* Drains, and ends the threads. */
SPARK_API void spark_jobs_destroy(spark_jobs *jobs);
/* All look again, and for awake_ns at least nobody sleeps. */
SPARK_API void spark_jobs_wake(spark_jobs *jobs, int64_t awake_ns);
/* Until then nobody needs to look: all sleep as soon as they find nothing to do. */
SPARK_API void spark_jobs_dismiss(spark_jobs *jobs);
/* Threads that should be awake and have given no sign for for_ns: they are stopped, or others have their cores. */
SPARK_API int64_t spark_jobs_missing(const spark_jobs *jobs, int64_t for_ns);
/* From now on jobs are declined; 1 when those that were claimed are done, 0 after timeout_ns. */
SPARK_API int32_t spark_jobs_drain(spark_jobs *jobs, int64_t timeout_ns);
/* The ring as it was at first, drained or not; only while no job is claimed and none is posted. */
SPARK_API void spark_jobs_reset(spark_jobs *jobs);
SPARK_API void spark_jobs_counts(spark_jobs *jobs, int64_t *counts);
/* For tests: the next n threads that come to a place wait there, until it is another place. */
SPARK_API void spark_jobs_hold(spark_jobs *jobs, int32_t place, int64_t n);

/* What a GPU does, on the host. Post the n records from job `number` on, which are filled; take one back, or wait for its
 * answer so long: SPARK_JOB_..., or 0 where there is none of this number. After 0 a job that was taken back is the
 * caller's; after SPARK_JOB_CLAIMED it has to be waited for. */
SPARK_API void spark_job_post(spark_job *ring, int64_t n_records, uint64_t number, int64_t n);
SPARK_API int32_t spark_job_take_back(spark_job *ring, int64_t n_records, uint64_t number);
SPARK_API int32_t spark_job_wait(spark_job *ring, int64_t n_records, uint64_t number, int64_t timeout_ns);

#ifdef __cplusplus
}
#endif
#endif
