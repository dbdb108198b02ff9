// The fibers and the turns that they take: what runtime.h declares. Every module has its own, from one compilation.

#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Warp {
    unsigned ready, waiting;  // lanes that can run; lanes that wait in an intrinsic
};

Fiber fibers[MAX_THREADS];
static Warp warps[MAX_THREADS / 32];
static int n_threads, n_live, n_in_barrier;
static bool ascending = true;
Fiber* current;
static int barrier_sum, barrier_result;
static Site barrier_site;
static void* scheduler;
static void (*kernel_body)(void**);
static void** kernel_args;
static char* stacks;
static const char* kernel_name;
alignas(1024) unsigned char shared_memory[MAX_SHARED_BYTES + GUARD_BYTES];
static char message[4096];
static volatile bool failed;
int n_dependency_waits;
static sigjmp_buf on_signal;

#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

// The stacks begin at different places of their pages: all at one would share a few lines of the first cache.
static void* new_stack_pointer(Fiber& f, void (*entry)()) {
    void** top = (void**)(f.stack + STACK_BYTES - (&f - fibers) % 32 * STACK_SKEW) - 2;
    top[0] = (void*)entry;  // where the first switch returns to, with the alignment that a call would leave
    top[1] = nullptr;
    return top - 6;
}
#else
static ucontext_t contexts[MAX_THREADS + 1];

static void emulator_switch(void** save, void* load) {
    static ucontext_t* active = &contexts[MAX_THREADS];
    ucontext_t* from = active;
    *save = from;
    active = (ucontext_t*)load;
    swapcontext(from, active);
}

static void* new_stack_pointer(Fiber& f, void (*entry)()) {
    ucontext_t* c = &contexts[&f - fibers];
    getcontext(c);
    c->uc_stack.ss_sp = f.stack;
    c->uc_stack.ss_size = STACK_BYTES;
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
    return c;
}
#endif

static void say(const char* format, ...) {
    size_t n = strlen(message);
    va_list args;
    va_start(args, format);
    vsnprintf(message + n, sizeof message - n, format, args);
    va_end(args);
}

static const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void say_where() {
    say("kernel %s, block (%u, %u, %u)", kernel_name, blockIdx.x, blockIdx.y, blockIdx.z);
    if (current) say(", thread (%u, %u, %u)", current->index.x, current->index.y, current->index.z);
    say(": ");
}

[[noreturn]] void fail(const Site* site, const char* format, ...) {
    say_where();
    size_t n = strlen(message);
    va_list args;
    va_start(args, format);
    vsnprintf(message + n, sizeof message - n, format, args);
    va_end(args);
    if (site) say(", %s:%d", base_name(site->file), site->line);
    failed = true;
    void* unused;
    emulator_switch(&unused, scheduler);
    abort();
}

// The next of the ready lanes after one; lane -1 or 32 for the first.
static int next_lane(unsigned ready, int lane) {
    if (ascending) {
        unsigned above = lane < 31 ? ready & (0xffffffffu << (lane + 1)) : 0;
        return __builtin_ctz(above ? above : ready);
    }
    unsigned below = lane > 0 && lane < 32 ? ready & ((1u << lane) - 1) : 0;
    return 31 - __builtin_clz(below ? below : ready);
}

// Goes on with another fiber of this warp, else with the scheduler.
static void give_way() {
    Fiber* self = current;
    int index = (int)(self - fibers);
    unsigned ready = warps[index / 32].ready;
    if (!ready) {
        emulator_switch(&self->stack_pointer, scheduler);
        return;
    }
    Fiber* next = &fibers[index / 32 * 32 + next_lane(ready, index % 32)];
    current = next;
    threadIdx = next->index;
    emulator_switch(&self->stack_pointer, next->stack_pointer);
}

static void release_barrier() {
    for (int i = 0; i < n_threads; i++)
        if (fibers[i].state == IN_BARRIER) {
            fibers[i].state = RUNNING;
            warps[i / 32].ready |= 1u << (i % 32);
        }
    n_in_barrier = 0;
    barrier_result = barrier_sum;
    barrier_sum = 0;
}

int block_barrier(int value, const Site& site) {
    Fiber* self = current;
    int index = (int)(self - fibers);
    if (n_in_barrier && (site.line != barrier_site.line || strcmp(site.file, barrier_site.file)))
        fail(&site, "at another %s than the threads that wait at %s:%d", site.what, base_name(barrier_site.file),
             barrier_site.line);
    barrier_site = self->site = site;
    self->state = IN_BARRIER;
    warps[index / 32].ready &= ~(1u << (index % 32));
    barrier_sum += value;
    if (++n_in_barrier == n_live)
        release_barrier();
    else
        give_way();
    return barrier_result;
}

void warp_collective(unsigned mask, void* operands, Complete complete, const Site& site) {
    Fiber* self = current;
    int index = (int)(self - fibers), lane = index % 32;
    Warp& warp = warps[index / 32];
    if (!(mask >> lane & 1)) fail(&site, "%s: the mask %08x lacks the calling lane %d", site.what, mask, lane);
    self->site = site;
    self->mask = mask;
    self->complete = complete;
    self->operands = operands;
    self->state = IN_WARP;
    warp.waiting |= 1u << lane;
    warp.ready &= ~(1u << lane);
    Fiber* lanes = self - lane;
    if ((warp.waiting & mask) == mask) {
        void* all[32];
        bool same = true;
        for (unsigned m = mask; m; m &= m - 1) {
            Fiber& f = lanes[__builtin_ctz(m)];
            if (f.mask != mask) same = false;
            else if (f.complete != complete)
                fail(&site, "lane %d is in %s (mask %08x), lane %d in %s at %s:%d", lane, site.what, mask,
                     __builtin_ctz(m), f.site.what, base_name(f.site.file), f.site.line);
            all[__builtin_ctz(m)] = f.operands;
        }
        if (same) {
            if (complete) complete(all, mask);
            for (unsigned m = mask; m; m &= m - 1) lanes[__builtin_ctz(m)].state = RUNNING;
            warp.waiting &= ~mask;
            warp.ready |= mask;
            return;
        }
    }
    give_way();
}

static void fiber_main() {
    kernel_body(kernel_args);
    Fiber* self = current;
    int index = (int)(self - fibers);
    self->state = DONE;
    warps[index / 32].ready &= ~(1u << (index % 32));
    if (--n_live && n_in_barrier == n_live) release_barrier();
    give_way();
    abort();
}

static void say_threads() {
    for (int i = 0; i < n_threads;) {
        Fiber& f = fibers[i];
        int j = i + 1;
        while (j < n_threads && fibers[j].state == f.state &&
               (f.state == DONE || (fibers[j].site.line == f.site.line && fibers[j].site.what == f.site.what &&
                                    (f.state != IN_WARP || fibers[j].mask == f.mask))))
            j++;
        say("\n  threads %d to %d: ", i, j - 1);
        if (f.state == DONE) say("returned");
        else say("wait in %s at %s:%d", f.site.what, base_name(f.site.file), f.site.line);
        if (f.state == IN_WARP) say(" for the lanes %08x", f.mask);
        i = j;
    }
}

static bool run_block(unsigned shared_bytes) {
    extern char shared_begin[] __asm__("__start_emulator_shared") __attribute__((weak, visibility("hidden")));
    extern char shared_end[] __asm__("__stop_emulator_shared") __attribute__((weak, visibility("hidden")));
    if (shared_begin) memset(shared_begin, 0xff, (size_t)(shared_end - shared_begin));
    memset(shared_memory, 0xff, shared_bytes);
    memset(shared_memory + shared_bytes, 0xa5, GUARD_BYTES);
    memset(warps, 0, sizeof warps);
    for (int i = 0; i < n_threads; i++) {
        Fiber& f = fibers[i];
        f.stack = stacks + (size_t)i * STACK_BYTES;
        f.stack_pointer = new_stack_pointer(f, fiber_main);
        f.index = {(unsigned)i % blockDim.x, (unsigned)i / blockDim.x % blockDim.y,
                   (unsigned)i / (blockDim.x * blockDim.y)};
        f.state = RUNNING;
        f.n_copies = f.committed = 0;
        warps[i / 32].ready |= 1u << (i % 32);
    }
    n_live = n_threads;
    n_in_barrier = barrier_sum = 0;
    int n_warps = (n_threads + 31) / 32;
    while (n_live) {
        bool progress = false;
        for (int i = 0; i < n_warps; i++) {
            int w = ascending ? i : n_warps - 1 - i;
            if (!warps[w].ready) continue;
            progress = true;
            current = &fibers[w * 32 + next_lane(warps[w].ready, 32)];
            threadIdx = current->index;
            emulator_switch(&scheduler, current->stack_pointer);
            if (failed) return false;
        }
        if (!progress) {
            current = nullptr;
            say_where();
            say("deadlock: no thread can go on");
            say_threads();
            return false;
        }
    }
    current = nullptr;
    for (int i = 0; i < GUARD_BYTES; i++)
        if (shared_memory[shared_bytes + i] != 0xa5) {
            say_where();
            say("wrote past its %u bytes of dynamic shared memory, at byte %u", shared_bytes, shared_bytes + i);
            return false;
        }
    return true;
}

static void signal_handler(int number, siginfo_t* info, void*) {
    say_where();
    if (number == SIGFPE) say("division by zero");
    else if (number == SIGILL) say("something the compiler holds to be impossible");
    else say("no memory may be accessed at %p", info->si_addr);
    siglongjmp(on_signal, 1);
}

static bool run_grid(const unsigned* grid, unsigned shared_bytes, bool backwards) {
    if (sigsetjmp(on_signal, 1)) return false;
    const unsigned n = grid[0] * grid[1] * grid[2];
    for (unsigned i = 0; i < n; i++) {
        const unsigned block = backwards ? n - 1 - i : i;
        blockIdx = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
        if (!run_block(shared_bytes)) return false;
    }
    return true;
}

const char* launch(const Entry& entry, const unsigned* grid, const unsigned* block, unsigned shared_bytes, void** args,
                   void* stack_memory, bool backwards) {
    static char signal_stack[64 << 10];
    message[0] = 0;
    failed = false;
    current = nullptr;
    ascending = !ascending;
    n_dependency_waits = 0;
    kernel_name = entry.name;
    kernel_body = entry.body;
    kernel_args = args;
    stacks = (char*)stack_memory;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    n_threads = (int)(block[0] * block[1] * block[2]);
    stack_t stack = {}, old_stack;
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    struct sigaction action = {}, old[4];
    action.sa_sigaction = signal_handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigaltstack(&stack, &old_stack);
    for (int i = 0; i < 4; i++) sigaction(signals[i], &action, &old[i]);
    bool ok = run_grid(grid, shared_bytes, backwards);
    for (int i = 0; i < 4; i++) sigaction(signals[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return ok ? nullptr : message;
}

}  // namespace emulator

// --- what -fsanitize calls ------------------------------------------------------------------------

extern "C" {
__attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(emulator::Site* data, size_t address) {
    // The data of all handlers begin with a location: file name, line, column.
    struct Location { const char* file; unsigned line, column; }* at = (Location*)data;
    emulator::Site site = {"", at->file, (int)at->line};
    emulator::fail(&site, "misaligned access at address %#zx", address);
}
__attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds_abort(void* data, size_t index) {
    struct Location { const char* file; unsigned line, column; }* at = (Location*)data;
    emulator::Site site = {"", at->file, (int)at->line};
    emulator::fail(&site, "index %zd outside of an array", index);
}
__attribute__((visibility("hidden"))) void __ubsan_handle_shift_out_of_bounds_abort(void* data, size_t, size_t amount) {
    struct Location { const char* file; unsigned line, column; }* at = (Location*)data;
    emulator::Site site = {"", at->file, (int)at->line};
    emulator::fail(&site, "shift by %zd", amount);
}
}
