// SETTLES = 1: a block of the kernel that reads experts chooses them. The last of a file's includes: what it includes itself is
// written out once (library.py), and that is behind a condition.
#pragma once

#include "settled.cuh"

#ifndef SETTLES
#define SETTLES 0
#endif
// What kernels take more: the first half of the experts all that the choice goes by, the second half the word.
#if SETTLES && defined GATE
#include "known.cuh"
#define CHOICE , ROUTE_PARAMETERS
#elif SETTLES
#define CHOICE , const u64* settled
#else
#define CHOICE
#endif
