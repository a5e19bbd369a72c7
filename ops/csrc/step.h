// What an optimizer's step goes over, and how its arithmetic is written: once, for CPU and CUDA.
//
// A Rule is the update of one element: operator()(parameter, gradient, a, b, c) with up to three states. Its static
// method `of` makes it from an op's options and the number of the step; kTrainsIn16 says whether mixes of dtypes deserve
// loops of their own. Options that only choose between two values
// are chosen without a branch, so that the loop over elements has none; they are kept as T, since compilers make no
// masks of a bool beside 16-bit numbers.

#pragma once

#include <cmath>

#include "numbers.h"

namespace shardlight {

constexpr int kStates = 3;
constexpr int kUseA = 1, kUseB = 2, kUseC = 4;  // which states an op has: a bit each

// As `_Step` in ops/native.py. Arrays have one entry per tensor.
struct Step {
    int64_t count;
    const int64_t* numel;
    void* const* parameter;
    const void* const* gradient;
    void* const* state[kStates];  // null: the op does not use it
    void* const* copy;            // of the parameter in another dtype; null, or null for a tensor: none
    const double* number;         // of this step, from 1
    const double* options;
    double scale, clip;           // gradients are multiplied by one, and then by the other
    int32_t parameter_dtype, gradient_dtype, state_dtype, copy_dtype;
    int32_t threads;
    void* stream;                 // CUDA's; null on CPU
};

constexpr int kNotForThese = -1;  // dtypes, or states, that an op has no version for

}  // namespace shardlight
