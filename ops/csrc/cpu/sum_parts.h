// Sums over ranks in rank order, so that they are the same bits on every rank; 16-bit numbers are added up in fp32.

#pragma once

#include "../numbers.h"

namespace shardlight {

// out = ((parts[0] + parts[1]) + parts[2]) + ... of n numbers each; with `add` this sum is added to out.
using Sum = void (*)(const void* const* parts, int count, void* out, size_t n, bool add);

// Returns null where numbers of `from` cannot be added up as `to`.
Sum sum_of(int from, int to);

}  // namespace shardlight
