// Experts that are guessed: words of device memory that a step's kernels share (engine/ops/cuda/landing.py). `bring` of
// landing.cu copies experts that a layer is likely to miss to landing slots, unit by unit, beside the kernels of the
// layers before. The first product of a layer says that what enters it is there, which the next layer's guesses go by;
// `route` finds the guesses that the layer does miss, and ends the copies; `gate_up` takes each unit from where it landed, or
// from host memory if it did not begin to. So a guess is another source of the same bytes, and nothing else. While what a
// layer misses crosses the link, no unit begins: the layer waits for the one, and the other may be for nothing.
//
// A unit is what one block of gate_up copies: LANDING_ROWS rows of gate and of up, or a share of down.
#pragma once

#include "ptx.cuh"

#define LANDING_SLOTS 4  // guesses of a layer
#define LANDING_ROWS 32  // of gate and of up in a unit

enum {
    LANDING_STEP,     // its number, from 1 on, by the first layer's `route`
    LANDING_BEGAN_NS, // when the step's first `route` ran
    LANDING_BOARD,    // address of host memory, to which the last `route` of a step copies the counts
    LANDING_ENTERED,  // the newest layer that may be guessed for, as the one ahead of it has what enters it: landing_layer
    LANDING_BUSY,     // blocks of gate_up that have yet to bring something over the link, by `route`
    // The counts, since the start:
    LANDING_MADE,     // guesses
    LANDING_USEFUL,   // those that were missed
    LANDING_MISSES,   // experts that were missed, of layers that there are guesses for
    LANDING_BROUGHT,  // bytes that landed
    LANDING_TAKEN,    // bytes that gate_up found landed
    LANDING_STEPS,    // steps without guesses, and with
    LANDING_NS = LANDING_STEPS + 2, // what these took in all, from the first `route` to the last
    LANDING_ARRIVED = 20, // by block of `bring`: how far it is
    LANDING_SETS = LANDING_ARRIVED + 32,
};
constexpr i32 LANDING_COUNTS = LANDING_NS + 2 - LANDING_MADE;

// A record's job where its expert was guessed: this minus its landing slot. CROSSES: it misses, and was not guessed.
#define FIRST_GUESSED (-1)
#define CROSSES (FIRST_GUESSED - LANDING_SLOTS)

// A layer of a step, and an expert of it; steps count from 1, so no tag is 0, nor is any NO_TAG.
#define NO_TAG (~0ull)
DEVICE u64 landing_layer(u64 step, i32 layer) { return step << 14 | (u64)layer; }
DEVICE u64 landing_tag(u64 step, i32 layer, i32 expert) { return landing_layer(step, layer) << 10 | (u64)expert; }

// What has begun to land: tag * 4 + state. Of another tag: nothing, yet.
enum { UNIT_BEGUN = 1, UNIT_LANDED, UNIT_REFUSED };

// By one thread of a kernel that what enters the layer ahead of `layer` is there for, with what it found before it waited for
// that: nobody counts a step meanwhile.
DEVICE u64 entered_of(const u64* words, i32 layer) { return landing_layer(load_fresh(words + LANDING_STEP), layer); }
DEVICE void say_entered(u64* words, u64 entered) { *(volatile u64*)(words + LANDING_ENTERED) = entered; }

// The landing slots of a layer, which has them together with layers that are never under way at the same time.
struct LandingSet {
    u64* words; // the newest layer that has been routed; tags by slot; units by slot
    i32 most_units;

    __device__ bool is_over(u64 layer) const { return load_fresh(words) >= layer; }
    __device__ u64* tag(i32 slot) const { return words + 1 + slot; }
    __device__ u64* unit(i32 slot, i32 n) const { return words + 1 + LANDING_SLOTS + slot * most_units + n; }
};

// Bytes of a copier's share of down, in whole pieces of 16.
DEVICE i64 share_of(i64 n_bytes, i32 copiers) { return (n_bytes + 16 * copiers - 1) / (16 * copiers) * 16; }

// By one thread, once for each unit: whether it landed, or is to be copied from host memory and is not begun any more. A
// unit that has begun is waited for: its block runs.
DEVICE bool take_unit(const LandingSet& set, i32 slot, i32 n) {
    const u64 tag = load_fresh(set.tag(slot));
    u64* const word = set.unit(slot, n);
    while (true) {
        const u64 seen = load_fresh(word);
        if (seen == tag * 4 + UNIT_LANDED) {
            __threadfence();
            return true;
        }
        if (seen != tag * 4 + UNIT_BEGUN && atomicCAS(word, seen, tag * 4 + UNIT_REFUSED) == seen)
            return false;
    }
}
