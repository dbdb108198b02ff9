// Everything that is not portable C++: integer types, half conversions, asynchronous copies, tensor cores.
//
// The one file with inline PTX, and no CUDA header is included anywhere, so NVRTC needs no include path. Tests
// compile the kernels for the host with another file of this name (tests/cuda_emulator/ptx.cuh): a function added
// here needs its twin there. Needs sm_80.
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
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
// The block's dynamic shared memory; one declaration a kernel.
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) u8 dynamic_shared_memory[]; type* const name = (type*)dynamic_shared_memory

// --- half precision: a half is a u16, a pair of them a u32 (first element in the low bits) ---------

DEVICE float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

DEVICE u32 pack_halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE u32 half2_add(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 half2_mul(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

DEVICE float bfloat_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

// (a & mask) | pattern in one instruction: bytes or nibbles into the mantissa of a half.
DEVICE u32 and_or(u32 a, u32 mask, u32 pattern) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(pattern));
    return r;
}

// __byte_perm, in which a nibble of 8 or more stands for the sign of the byte that its low three bits name, eight times.
DEVICE u32 permute_or_sign(u32 a, u32 b, u32 selectors) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selectors));
    return r;
}

// The upper half of a word, and a half with all its bits flipped, in the low 16 bits: by the units that multiply, since those that
// shift and permute have enough to do where this is asked for.
DEVICE u32 upper_half(u32 a) {
    u32 r;
    asm("dp2a.lo.u32.s32 %0, %1, %2, 0;" : "=r"(r) : "r"(a), "r"(0x0100));
    return r;
}
template <bool upper>
DEVICE u32 half_flipped(u32 a) { // -1 less the half
    u32 r;
    asm("dp2a.lo.u32.s32 %0, %1, %2, -1;" : "=r"(r) : "r"(a), "r"(upper ? 0xff00 : 0x00ff));
    return r;
}

// c + the dot product of four unsigned bytes (a) and four signed ones (b).
DEVICE i32 dot4_unsigned(u32 a, i32 b, i32 c) {
    i32 r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// --- memory ---------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The same pointer, worked out once: what lies at constant distances behind it then takes no arithmetic. Compilers like to
// add the distances first.
template <class T>
DEVICE T* kept_shared(T* p) {
    u32 address = shared_address(p);
    asm("" : "+r"(address));
    return (T*)__cvta_shared_to_generic(address);
}

template <class T>
DEVICE T* kept_global(T* p) {
    asm("" : "+l"(p));
    return p;
}

// 16 bytes from global (or mapped host) memory to shared memory, past L1; both 16-byte aligned.
DEVICE void copy16_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// The same, or 16 zero bytes when `valid` is false (nothing is read then).
DEVICE void copy16_async_if(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// 4 or 8 bytes, through L1; both aligned to as many.
DEVICE void copy4_async(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// 4 bytes, or 4 zero bytes when `valid` is false.
DEVICE void copy4_async_if(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

DEVICE void copy8_async(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` of this thread's groups are unfinished; then a barrier makes them visible to others.
template <int pending>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Read-only data that is used once: past L1.
DEVICE uint4 load_once16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// The same of what other multiprocessors wrote since the kernel began, behind a flag of theirs.
DEVICE uint4 load_shared16(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// What another SM or the host may have changed since the kernel began.
DEVICE i32 load_fresh(const i32* p) { return *(const volatile i32*)p; }
DEVICE u64 load_fresh(const u64* p) { return *(const volatile u64*)p; }
DEVICE float load_fresh(const float* p) { return *(const volatile float*)p; }

// To host memory that the host polls: one store of 8 bytes, after everything this thread wrote before.
DEVICE void store_system(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }

// From host memory that the host writes: what was written before it is seen behind this.
DEVICE u64 load_system(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// The same among multiprocessors, of which none waits for the link: what one has seen of the host's memory, those see that it
// tells.
DEVICE void store_told(u64* p, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u64 load_told(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// Between a store and a load of different words that the host does in the other order (engine/formats/expert_job.h).
DEVICE void fence_system() { asm volatile("fence.sc.sys;" ::: "memory"); }

// Nanoseconds of a clock that all multiprocessors share; it counts by 32 on Hopper.
DEVICE u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) :: "memory");
    return now;
}

// What v depends on is issued before a barrier that follows: compilers like to sink loads below a wait.
DEVICE void settle(i32& v) { asm volatile("" : "+r"(v)); }
DEVICE void settle(float& v) { asm volatile("" : "+f"(v)); }

// --- the kernel before ------------------------------------------------------------------------------

#ifdef STAMPS
// For benchmarks/profile_step.py alone: when the first block of kernel STAMP_ID had what it waited for. STAMPS is the
// address of STAMP_TICKS pairs of that time in ns and the number, by 32 ns, which is how the timer counts.
DEVICE void stamp() {
    if (threadIdx.x || blockIdx.x || blockIdx.y)
        return;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    u64* const entry = (u64*)STAMPS + 2 * (now / 32 % STAMP_TICKS);
    entry[0] = now;
    entry[1] = STAMP_ID;
}
#endif

// A kernel that is launched with `overlap` may begin before the one ahead of it has ended. It must call
// dependency_wait before it reads what that one writes, and before it writes anything; until then it may load what
// nobody changes. dependency_release lets the kernel behind begin; it promises nothing about data. Called early, it lets
// blocks of the kernel behind lie in wait, and those of the next one, where they take room and bytes from who still works:
// some kernels call it late, when what they waited for is there (docs/cuda.md has which, and what it was worth).
DEVICE void dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#ifdef STAMPS
    stamp();
#endif
#if defined(LATE) && __CUDA_ARCH__ >= 900 // for benchmarks/releases.py alone
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void dependency_release() {
#if !defined(LATE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of a kernel behind which the next one may read, before its own wait, what was complete before this one: the wait comes first.
DEVICE void dependency_wait_first() {
    dependency_wait();
    dependency_release();
}

// --- tensor cores ---------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrix4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

DEVICE void load_matrix4_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

// d [16, 8] += a [16, 16] b [16, 8], halves in, float32 out. Fragments as in the PTX manual (m16n8k16).
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d [16, 8] += a [16, 8] b [8, 8], of floats that are cut to 11 significant bits (m16n8k8).
DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d [16, 8] += a [16, 32] b [32, 8], signed bytes in, int32 out (m16n8k32).
DEVICE void mma_s8(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d [16, 8] = a [16, 32] b [32, 8] + c, where all elements of c are one number; a is bytes, signed or not, b signed ones.
template <bool is_signed>
DEVICE void mma_bytes(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, i32 c) {
    if constexpr (is_signed)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
}

// The same of half the depth (m16n8k16): a [16, 16], b [16, 8].
template <bool is_signed>
DEVICE void mma_bytes(i32 (&d)[4], u32 a0, u32 a1, u32 b, i32 c) {
    if constexpr (is_signed)
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(b), "r"(c));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(b), "r"(c));
}

// The larger one, NaN where one of them is.
DEVICE float larger_or_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// 2^x, approximate (2 ulp): attention only.
DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / x, approximate (1 ulp): prefill only.
DEVICE float reciprocal_fast(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
