// A GPU on one thread of the CPU: what a kernel of cuda/ needs of CUDA, in portable C++ (GCC, Linux).
//
// Blocks run one after the other, the threads of a block as fibers. A fiber gives way at barriers and warp
// intrinsics only: an intrinsic is done once, for all the lanes of its mask, by the lane that arrives last.
// Lanes and warps take turns in ascending order in one launch and in descending order in the next, so that a missing
// barrier shows. What would hang, fault or be undefined on a GPU ends the launch with an error that says where: a
// barrier that not all threads reach, a lane that an intrinsic names and that never comes, a misaligned access, an
// index outside of an array, writes past dynamic shared memory. Shared memory holds 0xff bytes when a block begins.
//
// This is what the code of a kernel needs of it; runtime.cpp has the rest, which is compiled once for all modules.
#pragma once

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define __CUDA_ARCH__ 800
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(threads, ...) EMULATOR_BOUNDS(threads) EMULATOR_END  // emulated_device.py takes it out
// Blocks share it because they take turns; the section lets it be poisoned as a whole.
#define __shared__ static __attribute__((section("emulator_shared")))

// What an intrinsic does for a warp is not what is tested: it is as fast as it can be, whatever the module around it is
// compiled with. A product on tensor cores is thousands of the CPU's operations.
#define EMULATOR_FAST __attribute__((optimize("O3", "fp-contract=off"), no_sanitize("undefined")))

struct uint3 { unsigned x, y, z; };
typedef uint3 dim3;
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

#pragma GCC visibility push(hidden)  // what a module shares with runtime.cpp is its own

extern uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace emulator {

struct Site {  // where a fiber waits
    const char *what, *file;
    int line;
};
#define EMULATOR_SITE(name) emulator::Site site = {name, __builtin_FILE(), __builtin_LINE()}

typedef void (*Complete)(void** lanes, unsigned mask);  // does a warp intrinsic for all lanes of the mask

struct Copy {  // an asynchronous copy that has not happened yet
    void* to;
    const void* from;  // null: zeros
    int n, group;
};

enum State { RUNNING, IN_WARP, IN_BARRIER, DONE };

struct Fiber {
    void* stack_pointer;
    char* stack;
    uint3 index;
    State state;
    Site site;
    unsigned mask;
    Complete complete;
    void* operands;
    Copy* copies;
    int n_copies, room, committed;
};

const int MAX_THREADS = 1024, STACK_BYTES = 128 << 10, STACK_SKEW = 17 * 64, GUARD_BYTES = 1024;
const int MAX_SHARED_BYTES = 228 << 10;

extern Fiber fibers[MAX_THREADS];
extern Fiber* current;
alignas(1024) extern unsigned char shared_memory[MAX_SHARED_BYTES + GUARD_BYTES];
extern int n_dependency_waits;  // of the launch

// Ends the launch with an error; called in a fiber, never returns.
[[noreturn]] void fail(const Site* site, const char* format, ...);

int block_barrier(int value, const Site& site);
void warp_collective(unsigned mask, void* operands, Complete complete, const Site& site);

template <class Op>
static inline void collective(unsigned mask, Op& op, const Site& site) {
    warp_collective(mask, &op, [](void** lanes, unsigned m) { Op::run((Op**)lanes, m); }, site);
}

// --- the module's interface -----------------------------------------------------------------------

template <class T> struct Kind {
    static const char value = sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'l' : sizeof(T) == 2 ? 'h' : 'b';
};
template <> struct Kind<float> { static const char value = 'f'; };
template <> struct Kind<double> { static const char value = 'd'; };
template <class T> struct Kind<T*> { static const char value = 'p'; };

template <int... I> struct Indices {};
template <int n, int... I> struct MakeIndices : MakeIndices<n - 1, n - 1, I...> {};
template <int... I> struct MakeIndices<0, I...> { typedef Indices<I...> type; };

template <class... A, int... I>
static inline void call(void (*kernel)(A...), void** args, Indices<I...>) {
    kernel(*(A*)args[I]...);
}

template <class... A>
static inline void call(void (*kernel)(A...), void** args) {
    call(kernel, args, typename MakeIndices<sizeof...(A)>::type());
}

template <class... A>
static const char* signature(void (*)(A...)) {
    static const char kinds[] = {Kind<A>::value..., 0};
    return kinds;
}

struct Entry {
    const char* name;
    const char* kinds;  // of its parameters: (p)ointer, (f)loat, (d)ouble, integers of 4 (i), 8 (l), 2 (h), 1 (b) bytes
    void (*body)(void**);
    int max_threads;  // its launch bound
};

// Runs a whole grid; the error message, null if there is none. stack_memory: STACK_BYTES a thread, for 1024 threads;
// all modules use the same. backwards: the last block first.
const char* launch(const Entry& entry, const unsigned* grid, const unsigned* block, unsigned shared_bytes, void** args,
                   void* stack_memory, bool backwards);

}  // namespace emulator

#pragma GCC visibility pop

#include "builtins.h"
