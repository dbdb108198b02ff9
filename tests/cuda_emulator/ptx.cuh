// The twin of cuda/ptx.cuh for the host: the same functions in plain C++, over runtime.h.
//
// An asynchronous copy happens when its group is waited for, not before, so a missing wait shows.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define WARP 32
#define FULL_WARP 0xffffffffu
#define DEVICE static inline __attribute__((unused))
#define KERNEL extern "C" __global__ void
#define DYNAMIC_SHARED(type, name) type* const name = (type*)emulator::shared_memory

// --- half precision -------------------------------------------------------------------------------

DEVICE float half_to_float(u16 h) __attribute__((always_inline));
DEVICE float half_to_float(u16 h) {
#ifdef __F16C__
    // What enters a double would be converted by a function of the compiler's library.
    typedef short halves __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps((halves){(short)h})[0];
#else
    return (float)emulator_bits<_Float16>(h);
#endif
}

DEVICE u16 float_to_half(float f) { return f != f ? 0x7fff : emulator_bits<u16>((_Float16)f); }

DEVICE u32 pack_halves(float low, float high) { return float_to_half(low) | (u32)float_to_half(high) << 16; }

DEVICE u32 half2_add(u32 a, u32 b) {
    return pack_halves(half_to_float((u16)a) + half_to_float((u16)b),
                       half_to_float((u16)(a >> 16)) + half_to_float((u16)(b >> 16)));
}

DEVICE u32 half2_mul(u32 a, u32 b) {
    return pack_halves(half_to_float((u16)a) * half_to_float((u16)b),
                       half_to_float((u16)(a >> 16)) * half_to_float((u16)(b >> 16)));
}

// The product is exact in a double, and where the sum is not, it is far from halfway between two halves. On its way to a
// half it is rounded to an odd float where it is none, which lies on the same side of what is halfway.
DEVICE u16 emulator_half_fma(u16 a, u16 b, u16 c) {
    const double sum = (double)half_to_float(a) * (double)half_to_float(b) + (double)half_to_float(c);
    const float near = (float)sum;
    if ((double)near == sum || sum != sum) return float_to_half(near);
    const bool is_beyond = __builtin_fabs((double)near) > __builtin_fabs(sum);
    return float_to_half(__uint_as_float((__float_as_uint(near) - is_beyond) | 1));
}

DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
    return emulator_half_fma((u16)a, (u16)b, (u16)c) |
           (u32)emulator_half_fma((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}

DEVICE float bfloat_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

DEVICE u32 and_or(u32 a, u32 mask, u32 pattern) { return (a & mask) | pattern; }

DEVICE u32 permute_or_sign(u32 a, u32 b, u32 selectors) { return __byte_perm(a, b, selectors); }

DEVICE u32 upper_half(u32 a) { return a >> 16; }
template <bool upper>
DEVICE u32 half_flipped(u32 a) {
    return -1 - (upper ? a >> 16 : a & 0xffff);
}

DEVICE i32 dot4_unsigned(u32 a, i32 b, i32 c) {
    return (i32)emulator_dot4(a, false, (u32)b, true, (u32)c);
}

// --- memory ---------------------------------------------------------------------------------------

DEVICE void emulator_check_aligned(const void* p, int n, const emulator::Site& site) {
    if ((size_t)p % (size_t)n) emulator::fail(&site, "%s: address %p is not %d-byte aligned", site.what, p, n);
}

DEVICE void emulator_copy_async(void* to, const void* from, int n, bool valid, const emulator::Site& site) {
    emulator_check_aligned(to, n, site);
    emulator_check_aligned(from, n, site);
    emulator::Fiber& f = *emulator::current;
    if (f.n_copies == f.room) {
        f.room = f.room ? 2 * f.room : 64;
        f.copies = (emulator::Copy*)realloc(f.copies, sizeof(emulator::Copy) * (size_t)f.room);
    }
    f.copies[f.n_copies++] = {to, valid ? from : nullptr, n, f.committed};
    memset(to, 0xff, (size_t)n); // whatever is still read there is lost, as it may be on a GPU
}

template <class T>
DEVICE T* kept_shared(T* p) { return p; }
template <class T>
DEVICE T* kept_global(T* p) { return p; }

DEVICE void copy16_async(void* shared, const void* global, EMULATOR_SITE("copy16_async")) {
    emulator_copy_async(shared, global, 16, true, site);
}

DEVICE void copy16_async_if(void* shared, const void* global, bool valid, EMULATOR_SITE("copy16_async_if")) {
    emulator_copy_async(shared, global, 16, valid, site);
}

DEVICE void copy4_async(void* shared, const void* global, EMULATOR_SITE("copy4_async")) {
    emulator_copy_async(shared, global, 4, true, site);
}

DEVICE void copy4_async_if(void* shared, const void* global, bool valid, EMULATOR_SITE("copy4_async_if")) {
    emulator_copy_async(shared, global, 4, valid, site);
}

DEVICE void copy8_async(void* shared, const void* global, EMULATOR_SITE("copy8_async")) {
    emulator_copy_async(shared, global, 8, true, site);
}

DEVICE void copies_commit() { emulator::current->committed++; }

template <int pending>
DEVICE void copies_wait() {
    emulator::Fiber& f = *emulator::current;
    int n = 0;
    for (; n < f.n_copies && f.copies[n].group < f.committed - pending; n++) {
        const emulator::Copy& c = f.copies[n];
        if (c.from) memcpy(c.to, c.from, (size_t)c.n);
        else memset(c.to, 0, (size_t)c.n);
    }
    f.n_copies -= n;
    if (n && f.n_copies) memmove(f.copies, f.copies + n, sizeof(emulator::Copy) * (size_t)f.n_copies);
}

DEVICE uint4 load_once16(const void* p, EMULATOR_SITE("load_once16")) {
    emulator_check_aligned(p, 16, site);
    return *(const uint4*)p;
}

DEVICE uint4 load_shared16(const void* p, EMULATOR_SITE("load_shared16")) {
    emulator_check_aligned(p, 16, site);
    return *(const uint4*)p;
}

DEVICE i32 load_fresh(const i32* p) { return *(const volatile i32*)p; }
DEVICE u64 load_fresh(const u64* p) { return *(const volatile u64*)p; }
DEVICE float load_fresh(const float* p) { return *(const volatile float*)p; }

DEVICE void store_system(u64* p, u64 v) { *(volatile u64*)p = v; }

DEVICE u64 load_system(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void store_told(u64* p, u64 v) { *(volatile u64*)p = v; }
DEVICE u64 load_told(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

DEVICE u64 clock_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}

DEVICE void settle(i32& v) { (void)v; }
DEVICE void settle(float& v) { (void)v; }

// --- the kernel before: here it has always ended; the launch tells whether anybody waited ---------

DEVICE void dependency_wait() { emulator::n_dependency_waits++; }
DEVICE void dependency_release() {}
DEVICE void dependency_wait_first() { dependency_wait(); }

// --- tensor cores: lane i holds, of a row group i / 4, columns by i % 4, as the PTX manual draws them --

template <bool transposed>
struct EmulatorLoadMatrix {
    const void* row;
    u32 r[4];
    EMULATOR_FAST static void run(EmulatorLoadMatrix** lanes, u32) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                u16 pair[2];
                for (int i = 0; i < 2; i++) {
                    int along = lane % 4 * 2 + i, across = lane / 4;
                    int row = transposed ? along : across, column = transposed ? across : along;
                    pair[i] = ((const u16*)lanes[8 * m + row]->row)[column];
                }
                lanes[lane]->r[m] = pair[0] | (u32)pair[1] << 16;
            }
    }
};

DEVICE void load_matrix4(u32 (&r)[4], const void* row, EMULATOR_SITE("load_matrix4")) {
    emulator_check_aligned(row, 16, site);
    EmulatorLoadMatrix<false> op = {row, {}};
    emulator::collective(FULL_WARP, op, site);
    memcpy(r, op.r, sizeof r);
}

DEVICE void load_matrix4_transposed(u32 (&r)[4], const void* row, EMULATOR_SITE("load_matrix4_transposed")) {
    emulator_check_aligned(row, 16, site);
    EmulatorLoadMatrix<true> op = {row, {}};
    emulator::collective(FULL_WARP, op, site);
    memcpy(r, op.r, sizeof r);
}

// One 16x8 product. Element: what a register holds 32 / n of, which lane i's registers hold n wide pieces of.
template <class Element, class Sum, int k>
struct EmulatorMma {
    u32 a[4], b[2];
    Sum* d;
    static __forceinline__ float value(u16 h) { return half_to_float(h); }
    static __forceinline__ i32 value(i8 v) { return v; }
    static __forceinline__ float value(u32 v) {
        float f;
        v &= 0xffffe000u;
        memcpy(&f, &v, sizeof f);
        return f;
    }
    EMULATOR_FAST static void run(EmulatorMma** lanes, u32) {
        const int n = 4 / sizeof(Element);  // elements of a register
        Sum a[16][k], b[k][8], d[16][8];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, first = lane % 4 * n;
            Element e[4][n];
            memcpy(e, lanes[lane]->a, sizeof e);
            for (int r = 0; r < 4; r++)
                for (int i = 0; i < n; i++) a[group + r % 2 * 8][first + i + r / 2 * (k / 2)] = value(e[r][i]);
            memcpy(e, lanes[lane]->b, 8);
            for (int r = 0; r < 2; r++)
                for (int i = 0; i < n; i++) b[first + i + r * (k / 2)][group] = value(e[r][i]);
            for (int i = 0; i < 4; i++) d[group + i / 2 * 8][lane % 4 * 2 + i % 2] = lanes[lane]->d[i];
        }
        for (int row = 0; row < 16; row++)
            for (int i = 0; i < k; i++)
                for (int column = 0; column < 8; column++) d[row][column] += a[row][i] * b[i][column];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) lanes[lane]->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
};

DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE("mma_f16")) {
    float sums[4] = {d[0], d[1], d[2], d[3]};
    EmulatorMma<u16, float, 16> op = {{a[0], a[1], a[2], a[3]}, {b0, b1}, sums};
    emulator::collective(FULL_WARP, op, site);
    memcpy(d, sums, sizeof d);
}

DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE("mma_tf32")) {
    float sums[4] = {d[0], d[1], d[2], d[3]};
    EmulatorMma<u32, float, 8> op = {{a[0], a[1], a[2], a[3]}, {b0, b1}, sums};
    emulator::collective(FULL_WARP, op, site);
    memcpy(d, sums, sizeof d);
}

DEVICE void mma_s8(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE("mma_s8")) {
    i32 sums[4] = {d[0], d[1], d[2], d[3]};
    EmulatorMma<i8, i32, 32> op = {{a[0], a[1], a[2], a[3]}, {b0, b1}, sums};
    emulator::collective(FULL_WARP, op, site);
    memcpy(d, sums, sizeof d);
}

// One 16x8 product of unsigned or signed bytes with signed ones: as EmulatorMma, the first matrix's elements of either kind.
template <class First, int k>
struct EmulatorByteMma {
    u32 a[4], b[2];
    i32* d;
    EMULATOR_FAST static void run(EmulatorByteMma** lanes, u32) {
        i32 a[16][k], b[k][8];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, first = lane % 4 * 4;
            for (int r = 0; r < k / 8; r++)
                for (int i = 0; i < 4; i++)
                    a[group + r % 2 * 8][first + i + r / 2 * 16] = (First)(lanes[lane]->a[r] >> (8 * i));
            for (int r = 0; r < k / 16; r++)
                for (int i = 0; i < 4; i++) b[first + i + r * 16][group] = (i8)(lanes[lane]->b[r] >> (8 * i));
        }
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 4; e++)
                for (int i = 0; i < k; i++)
                    lanes[lane]->d[e] += a[lane / 4 + e / 2 * 8][i] * b[i][lane % 4 * 2 + e % 2];
    }
};

template <class First, int k>
DEVICE void emulator_mma_bytes(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, i32 c, const emulator::Site& site) {
    i32 sums[4] = {c, c, c, c};
    EmulatorByteMma<First, k> op = {{a[0], a[1], a[2], a[3]}, {b0, b1}, sums};
    emulator::collective(FULL_WARP, op, site);
    memcpy(d, sums, sizeof d);
}

template <bool is_signed>
DEVICE void mma_bytes(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, i32 c, EMULATOR_SITE("mma_bytes")) {
    if constexpr (is_signed) emulator_mma_bytes<i8, 32>(d, a, b0, b1, c, site);
    else emulator_mma_bytes<u8, 32>(d, a, b0, b1, c, site);
}

template <bool is_signed>
DEVICE void mma_bytes(i32 (&d)[4], u32 a0, u32 a1, u32 b, i32 c, EMULATOR_SITE("mma_bytes")) {
    if constexpr (is_signed) emulator_mma_bytes<i8, 16>(d, {a0, a1, 0, 0}, b, 0, c, site);
    else emulator_mma_bytes<u8, 16>(d, {a0, a1, 0, 0}, b, 0, c, site);
}

DEVICE float larger_or_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffffu) : a > b ? a : b; }

DEVICE float exp2_fast(float x) { return exp2f(x); }

DEVICE float reciprocal_fast(float x) { return 1.0f / x; }
