#include "workspace.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#if defined(SPARK_X86)
#include <cpuid.h>
#endif

namespace spark {

#if defined(SPARK_X86)
namespace {

uint64_t enabled_states() { // of the registers that the system saves: XCR0
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

int detect() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return SPARK_ISA_PORTABLE;
    const bool saves = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!saves || !avx || !fma || !f16c || (enabled_states() & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return SPARK_ISA_PORTABLE;
    if (!(b >> 5 & 1)) // AVX2
        return SPARK_ISA_PORTABLE;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
    if (!f || !dq || !bw || !vl || (enabled_states() & 0xe6) != 0xe6)
        return SPARK_ISA_AVX2;
    return vnni ? SPARK_ISA_AVX512_VNNI : SPARK_ISA_AVX512;
}

} // namespace
#endif

void no_such_type(int64_t type) {
    std::fprintf(stderr, "spark_cpu: a matrix of type %lld, which has no kernels\n", static_cast<long long>(type));
    std::abort();
}

int best_isa() {
#if defined(SPARK_X86)
    static const int best = detect();
    return best;
#else
    return SPARK_ISA_PORTABLE;
#endif
}

const Kernels *choose_kernels(int isa) {
    if (isa < SPARK_ISA_PORTABLE || isa > best_isa())
        return nullptr;
#if defined(SPARK_X86)
    const Kernels *const tables[] = {&kernels_portable, &kernels_avx2, &kernels_avx512, &kernels_avx512vnni};
    return tables[isa];
#else
    return &kernels_portable;
#endif
}

} // namespace spark

using namespace spark;

static int64_t ff_of_experts(const spark_limits &l) { return l.n_ff_exp ? l.n_ff_exp : l.n_ff; }

spark_workspace::spark_workspace(const spark_limits &l, int threads, const Kernels &k)
    : limits(l), kernels(k), pool(threads), widest(std::max({l.n_embd, l.n_head_dim, l.n_ff, l.n_z})),
      activations(l.max_tokens * supers(widest)), normed(l.max_tokens * widest), keys(l.max_tokens * l.n_head_dim),
      values(l.max_tokens * l.n_head_dim), row_scale(l.max_tokens), convolved(l.n_mixed ? l.max_tokens * std::max(l.n_mixed, l.n_embd) : 0),
      decays(l.max_tokens * l.n_head_v), rates(l.max_tokens * l.n_head_v),
      hidden(l.max_tokens * std::max(l.n_expert_used * supers(ff_of_experts(l)), supers(l.n_ff))),
      plain_hidden(l.max_tokens * std::max(l.n_expert_used * ff_of_experts(l), l.n_ff)), pair_token(l.max_tokens * l.n_expert_used),
      place_of_pair(l.max_tokens * l.n_expert_used), groups(l.n_expert), uses(l.n_expert), order(l.n_expert),
      tiles(l.max_tokens + 1),
      expert_floats(padded(std::max((2 * kGroupTokens + l.max_tokens * l.n_expert_used) * kChunkRows, 2 * l.n_expert), 16)),
      attention_floats(padded(attention_scratch_floats(std::min<int64_t>(l.n_head_dim, kMaxHeadDim)), 16)),
      expert_scratch(expert_floats * threads), attention_scratch(attention_floats * threads) {}

extern "C" {

int32_t spark_abi(void) { return SPARK_CPU_ABI; }

const char *spark_block_types(void) {
#define SPARK_LINE(...) #__VA_ARGS__ "\n"
    return BLOCK_TYPES(SPARK_LINE);
#undef SPARK_LINE
}

int32_t spark_best_isa(void) { return best_isa(); }

spark_workspace *spark_workspace_create(const spark_limits *limits, int32_t threads, int32_t isa) {
    const Kernels *kernels = choose_kernels(isa);
    if (!kernels)
        return nullptr;
    try {
        return new spark_workspace(*limits, threads, *kernels);
    } catch (const std::exception &) { // memory or threads
        return nullptr;
    }
}

void spark_workspace_destroy(spark_workspace *ws) { delete ws; }

} // extern "C"
