// Memory is asked for before it is needed: the processor itself does not look beyond a page, and a step goes through
// up to six buffers at once.

#pragma once

#include "../numbers.h"

namespace shardlight {

constexpr size_t kChunk = 64, kAhead = 512;  // elements: at a time, and how far ahead

// Asks for the chunk that is kAhead elements behind x[i]; where that is no memory, nothing happens.
template <class T> ANYWHERE void fetch_ahead(const T* x, size_t i) {
    const uintptr_t at = uintptr_t(x) + (i + kAhead) * sizeof(T);
    for (size_t k = 0; k < kChunk * sizeof(T); k += 64) __builtin_prefetch(reinterpret_cast<const void*>(at + k));
}

}  // namespace shardlight
