// Operations that were called once, called again with the same arguments: a step in which nothing has changed but what
// lies in its arrays. One call from outside then does for all, whose arguments nobody has to convert and check again.
#include <cstring>
#include <utility>

#include "spark_cpu.h"

namespace {

template <class T>
T argument(uint64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(static_cast<uintptr_t>(word));
    } else if constexpr (std::is_same_v<T, float>) {
        const uint32_t bits = static_cast<uint32_t>(word);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return static_cast<T>(word);
    }
}

template <class... A, size_t... I>
int32_t apply(int32_t (*f)(spark_workspace *, A...), spark_workspace *ws, const uint64_t *words,
              std::index_sequence<I...>) {
    return f(ws, argument<A>(words[I])...);
}

template <class... A>
constexpr int64_t arity(int32_t (*)(spark_workspace *, A...)) {
    return sizeof...(A);
}

template <class... A>
int32_t call(int32_t (*f)(spark_workspace *, A...), spark_workspace *ws, const uint64_t *words) {
    return apply(f, ws, words, std::make_index_sequence<sizeof...(A)>{});
}

template <auto f>
int32_t run(spark_workspace *ws, const uint64_t *words) {
    return call(f, ws, words);
}

struct Operation {
    const char *name;
    int64_t n_words;
    int32_t (*run)(spark_workspace *, const uint64_t *);
};

#define OPERATION(f) {#f, arity(f), run<f>}
constexpr Operation OPERATIONS[] = {
    OPERATION(spark_product),      OPERATION(spark_embed),     OPERATION(spark_norm),
    OPERATION(spark_add_norm),     OPERATION(spark_router),    OPERATION(spark_attention_input),
    OPERATION(spark_attention),    OPERATION(spark_route),     OPERATION(spark_attention_output),
    OPERATION(spark_expert_ffn),   OPERATION(spark_dense_ffn), OPERATION(spark_delta_input),
    OPERATION(spark_delta_output), OPERATION(spark_delta),     OPERATION(spark_head),
    OPERATION(spark_summarize),    OPERATION(spark_choose),
};
#undef OPERATION
constexpr int64_t N_OPERATIONS = sizeof OPERATIONS / sizeof *OPERATIONS;

} // namespace

extern "C" {

int64_t spark_operation(const char *name) {
    for (int64_t i = 0; i < N_OPERATIONS; i++)
        if (std::strcmp(OPERATIONS[i].name, name) == 0)
            return i;
    return -1;
}

int32_t spark_repeat(spark_workspace *ws, const int64_t *operations, int64_t n, const uint64_t *words, int64_t *done) {
    for (*done = 0; *done < n; ++*done) {
        const Operation &operation = OPERATIONS[operations[*done]];
        if (const int32_t result = operation.run(ws, words))
            return result;
        words += operation.n_words;
    }
    return SPARK_OK;
}

} // extern "C"
