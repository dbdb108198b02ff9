// Reading a part of a context: sketches of the blocks of keys, and which blocks each row of a step reads by them. Twins:
// summarize and choose of engine/ops/reference.py (docs/arithmetic.md, "Recall").
#include <algorithm>

#include "workspace.h"

using namespace spark;

extern "C" {

int32_t spark_summarize(spark_workspace *ws, const spark_kv *kv, const int32_t *places, const int32_t *blocks, int64_t n,
                        int64_t n_blocks, uint8_t *sketches) {
    if (out_of_range(places, n, kv->n_slots / kKVBlock) || out_of_range(blocks, n, n_blocks))
        return SPARK_BAD_INDEX;
    const int64_t bytes = SketchLayout(kv->head_dim).bytes;
    ws->pool.run(n * kv->n_head_kv, [&](int64_t item, int) {
        const int64_t i = item / kv->n_head_kv, head = item % kv->n_head_kv;
        ws->kernels.summarize(*kv, places[i], head, sketches + (blocks[i] * kv->n_head_kv + head) * bytes);
    });
    return SPARK_OK;
}

int32_t spark_choose(spark_workspace *ws, const float *q, int64_t T, int64_t n_head, int64_t n_head_kv, int64_t head_dim,
                     const uint8_t *sketches, int64_t n_blocks, const int32_t *blocks, int64_t n_sequence, int64_t width,
                     const int32_t *sequence, const int32_t *positions, const int32_t *most, const int32_t *leave,
                     const uint8_t *keep, float scale, uint8_t *chosen, float *left, int32_t *read, float *masses,
                     float *scores) {
    if (out_of_range(sequence, T, n_sequence) || out_of_range(positions, T, width * kKVBlock))
        return SPARK_BAD_INDEX;
    const auto behind = [&](int64_t t) { return std::max<int64_t>(0, positions[t] / kKVBlock - kTailBlocks); };
    for (int64_t t = 0; t < T; t++)
        if (out_of_range(blocks + sequence[t] * width, behind(t), n_blocks, -1))
            return SPARK_BAD_INDEX;
    const int64_t group = n_head / n_head_kv, bytes = SketchLayout(head_dim).bytes;
    ws->pool.run(T * n_head_kv, [&](int64_t item, int) {
        const int64_t t = item / n_head_kv, head = item % n_head_kv;
        RecallRow row;
        row.q = q + (t * n_head + head * group) * head_dim;
        row.sketches = sketches + head * bytes;
        row.blocks = blocks + sequence[t] * width;
        row.keep = keep + sequence[t] * width;
        row.heads = group;
        row.head_dim = head_dim;
        row.block_bytes = n_head_kv * bytes;
        row.width = width;
        row.behind = behind(t);
        row.last = positions[t] / kKVBlock;
        row.most = most[t];
        row.leave = leave[t];
        row.scale = scale;
        row.chosen = chosen + item * width;
        row.left = left + (t * n_head + head * group) * 2;
        row.read = read + item;
        row.mass = masses + (t * n_head + head * group) * 2 * width;
        row.score = reinterpret_cast<int32_t *>(scores + item * width);
        ws->kernels.choose(row);
    });
    return SPARK_OK;
}

} // extern "C"
