// CUDA's built-in functions, as runtime.h needs them.
#pragma once

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float powf(float, float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float tanhf(float) noexcept;
}
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
static inline float rintf(float a) { return __builtin_rintf(a); }
static inline float floorf(float a) { return __builtin_floorf(a); }
static inline float ceilf(float a) { return __builtin_ceilf(a); }
static inline float truncf(float a) { return __builtin_truncf(a); }
static inline float roundf(float a) { return __builtin_roundf(a); }
static inline float sqrtf(float a) { return __builtin_sqrtf(a); }
static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float ldexpf(float a, int e) { return __builtin_ldexpf(a, e); }
static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
static inline float __expf(float a) { return expf(a); }
static inline float __logf(float a) { return logf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline bool isnan(float a) { return __builtin_isnan(a); }
static inline bool isinf(float a) { return __builtin_isinf(a); }
static inline bool isfinite(float a) { return __builtin_isfinite(a); }

static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }

static inline int emulator_to_int(float a) {
    if (__builtin_isnan(a)) return 0;
    return a >= 2147483648.0f ? 0x7fffffff : a < -2147483648.0f ? -0x7fffffff - 1 : (int)a;
}
static inline int __float2int_rn(float a) { return emulator_to_int(__builtin_rintf(a)); }
static inline int __float2int_rz(float a) { return emulator_to_int(__builtin_truncf(a)); }
static inline int __float2int_rd(float a) { return emulator_to_int(__builtin_floorf(a)); }
static inline int __float2int_ru(float a) { return emulator_to_int(__builtin_ceilf(a)); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }

template <class To, class From>
static inline To emulator_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline int __float_as_int(float a) { return emulator_bits<int>(a); }
static inline unsigned __float_as_uint(float a) { return emulator_bits<unsigned>(a); }
static inline float __int_as_float(int a) { return emulator_bits<float>(a); }
static inline float __uint_as_float(unsigned a) { return emulator_bits<float>(a); }

#define EMULATOR_MIN_MAX(R, A, B)                                             \
    static inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
    static inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
EMULATOR_MIN_MAX(int, int, int)
EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
EMULATOR_MIN_MAX(unsigned, int, unsigned)
EMULATOR_MIN_MAX(unsigned, unsigned, int)
EMULATOR_MIN_MAX(long long, long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }

static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
static inline int __ffs(int a) { return __builtin_ffs(a); }
static inline int __ffsll(long long a) { return __builtin_ffsll(a); }
static inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
static inline int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
static inline unsigned __brev(unsigned a) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

// Most of a product's instructions are these two: four bytes at a time where the CPU can.
#if defined(__SSE4_1__)
typedef char emulator_bytes __attribute__((vector_size(16)));
typedef short emulator_shorts __attribute__((vector_size(16)));
typedef int emulator_ints __attribute__((vector_size(16)));
static inline emulator_bytes emulator_four(unsigned a) { return (emulator_bytes)(emulator_ints){(int)a}; }
static inline emulator_shorts emulator_widen(unsigned a, bool is_signed) {
    return is_signed ? __builtin_ia32_pmovsxbw128(emulator_four(a)) : __builtin_ia32_pmovzxbw128(emulator_four(a));
}
static inline unsigned emulator_dot4(unsigned a, bool signed_a, unsigned b, bool signed_b, unsigned c) {
    emulator_ints pairs = __builtin_ia32_pmaddwd128(emulator_widen(a, signed_a), emulator_widen(b, signed_b));
    return c + (unsigned)pairs[0] + (unsigned)pairs[1];
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned spread = selector & 0xffff;  // a nibble a byte
    spread = (spread | spread << 8) & 0x00ff00ff;
    spread = (spread | spread << 4) & 0x0f0f0f0f;
    emulator_bytes both = (emulator_bytes)(emulator_ints){(int)a, (int)b};
    unsigned taken = (unsigned)((emulator_ints)__builtin_ia32_pshufb128(both, emulator_four(spread & 0x07070707)))[0];
    unsigned replicated = (spread >> 3 & 0x01010101) * 0xff;  // the sign, of these bytes
    return (taken & ~replicated) | ((taken >> 7 & 0x01010101) * 0xff & replicated);
}
#else
static inline unsigned emulator_dot4(unsigned a, bool signed_a, unsigned b, bool signed_b, unsigned c) {
    for (int i = 0; i < 32; i += 8) {
        int x = a >> i & 0xff, y = b >> i & 0xff;
        c += (unsigned)((signed_a ? (signed char)x : x) * (signed_b ? (signed char)y : y));
    }
    return c;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> (4 * i) & 15;
        unsigned byte = (unsigned)(bytes >> (8 * (s & 7))) & 0xff;
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, replicated
        r |= byte << (8 * i);
    }
    return r;
}
#endif
static inline int __dp4a(int a, int b, int c) {
    return (int)emulator_dot4((unsigned)a, true, (unsigned)b, true, (unsigned)c);
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return emulator_dot4(a, false, b, false, c); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
    return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
}
static inline unsigned __vadd4(unsigned a, unsigned b) {
    return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
}

template <class T>
static inline T __ldg(const T* p) { return *p; }

#define EMULATOR_ATOMICS(T)                                                                      \
    static inline T atomicAdd(T* p, T v) { T old = *p; *p = (T)(old + v); return old; }         \
    static inline T atomicMax(T* p, T v) { T old = *p; *p = old > v ? old : v; return old; }    \
    static inline T atomicMin(T* p, T v) { T old = *p; *p = old < v ? old : v; return old; }    \
    static inline T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }               \
    static inline T atomicAnd(T* p, T v) { T old = *p; *p = old & v; return old; }              \
    static inline T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }                   \
    static inline T atomicCAS(T* p, T expected, T v) { T old = *p; if (old == expected) *p = v; return old; }
EMULATOR_ATOMICS(int)
EMULATOR_ATOMICS(unsigned)
EMULATOR_ATOMICS(unsigned long long)

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
[[noreturn]] static inline void __trap(EMULATOR_SITE("__trap")) { emulator::fail(&site, "__trap"); }

// --- barriers -------------------------------------------------------------------------------------

static inline void __syncthreads(EMULATOR_SITE("__syncthreads")) { emulator::block_barrier(0, site); }
static inline int __syncthreads_or(int v, EMULATOR_SITE("__syncthreads_or")) {
    return emulator::block_barrier(v != 0, site) != 0;
}
static inline int __syncthreads_and(int v, EMULATOR_SITE("__syncthreads_and")) {
    return emulator::block_barrier(v == 0, site) == 0;
}
static inline int __syncthreads_count(int v, EMULATOR_SITE("__syncthreads_count")) {
    return emulator::block_barrier(v != 0, site);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE("__syncwarp")) {
    emulator::warp_collective(mask, nullptr, nullptr, site);
}

// --- warps ----------------------------------------------------------------------------------------

namespace emulator {

#define EMULATOR_LANES(mask, lane) \
    for (unsigned left = mask, lane; left && ((lane = (unsigned)__builtin_ctz(left)), true); left &= left - 1)

template <class T>
struct Shuffle {
    T value, result;
    int source;
    Site site;
    EMULATOR_FAST static void run(Shuffle** lanes, unsigned mask) {
        EMULATOR_LANES(mask, lane) {
            int source = lanes[lane]->source;
            if (!(mask >> source & 1))
                fail(&lanes[lane]->site, "%s: lane %u reads lane %d, which is not in the mask %08x",
                     lanes[lane]->site.what, lane, source, mask);
            lanes[lane]->result = lanes[source]->value;
        }
    }
};

static inline int lane() { return (int)(current - fibers) % 32; }

template <class T>
static inline T shuffle(unsigned mask, T value, int source, const Site& site) {
    Shuffle<T> op = {value, value, source, site};
    collective(mask, op, site);
    return op.result;
}

struct Ballot {
    unsigned value, result;
    EMULATOR_FAST static void run(Ballot** lanes, unsigned mask) {
        unsigned all = 0;
        EMULATOR_LANES(mask, lane) all |= (lanes[lane]->value ? 1u : 0u) << lane;
        EMULATOR_LANES(mask, lane) lanes[lane]->result = all;
    }
};

template <class T>
struct Match {
    T value;
    unsigned result;
    EMULATOR_FAST static void run(Match** lanes, unsigned mask) {
        EMULATOR_LANES(mask, lane) {
            unsigned same = 0;
            EMULATOR_LANES(mask, other) same |= (lanes[other]->value == lanes[lane]->value ? 1u : 0u) << other;
            lanes[lane]->result = same;
        }
    }
};

enum Reduction { ADD, MAX, MIN, OR, AND };

template <class T, Reduction reduction>
struct Reduce {
    T value, result;
    EMULATOR_FAST static void run(Reduce** lanes, unsigned mask) {
        bool first = true;
        T all = 0;
        EMULATOR_LANES(mask, lane) {
            T v = lanes[lane]->value;
            if (first) all = v;
            else if (reduction == ADD) all = (T)((unsigned)all + (unsigned)v);
            else if (reduction == MAX) all = v > all ? v : all;
            else if (reduction == MIN) all = v < all ? v : all;
            else if (reduction == OR) all |= v;
            else all &= v;
            first = false;
        }
        EMULATOR_LANES(mask, lane) lanes[lane]->result = all;
    }
};

}  // namespace emulator

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE("__shfl_sync")) {
    return emulator::shuffle(mask, value, (emulator::lane() & ~(width - 1)) | (source & (width - 1)), site);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                               EMULATOR_SITE("__shfl_up_sync")) {
    int lane = emulator::lane(), source = lane - (int)delta;
    return emulator::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source, site);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                                 EMULATOR_SITE("__shfl_down_sync")) {
    int lane = emulator::lane(), source = lane + (int)delta;
    return emulator::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, site);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATOR_SITE("__shfl_xor_sync")) {
    int lane = emulator::lane(), source = lane ^ lanes;
    return emulator::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, site);
}
static inline unsigned __ballot_sync(unsigned mask, int v, EMULATOR_SITE("__ballot_sync")) {
    emulator::Ballot op = {v != 0, 0};
    emulator::collective(mask, op, site);
    return op.result;
}
static inline int __any_sync(unsigned mask, int v, EMULATOR_SITE("__any_sync")) {
    emulator::Ballot op = {v != 0, 0};
    emulator::collective(mask, op, site);
    return op.result != 0;
}
static inline int __all_sync(unsigned mask, int v, EMULATOR_SITE("__all_sync")) {
    emulator::Ballot op = {v == 0, 0};
    emulator::collective(mask, op, site);
    return op.result == 0;
}
template <class T>
static inline unsigned __match_any_sync(unsigned mask, T v, EMULATOR_SITE("__match_any_sync")) {
    emulator::Match<T> op = {v, 0};
    emulator::collective(mask, op, site);
    return op.result;
}
#define EMULATOR_REDUCE(T, name, reduction)                              \
    static inline T name(unsigned mask, T v, EMULATOR_SITE(#name)) {     \
        emulator::Reduce<T, emulator::reduction> op = {v, 0};            \
        emulator::collective(mask, op, site);                            \
        return op.result;                                                \
    }
EMULATOR_REDUCE(int, __reduce_add_sync, ADD)
EMULATOR_REDUCE(int, __reduce_max_sync, MAX)
EMULATOR_REDUCE(int, __reduce_min_sync, MIN)
EMULATOR_REDUCE(unsigned, __reduce_add_sync, ADD)
EMULATOR_REDUCE(unsigned, __reduce_max_sync, MAX)
EMULATOR_REDUCE(unsigned, __reduce_min_sync, MIN)
EMULATOR_REDUCE(unsigned, __reduce_or_sync, OR)
EMULATOR_REDUCE(unsigned, __reduce_and_sync, AND)
static inline unsigned __activemask() { return 1u << emulator::lane(); }
