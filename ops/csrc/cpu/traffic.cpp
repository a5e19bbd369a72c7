// What a step reads and writes, without its arithmetic: the limit that `shardlight bench ops` holds steps against.

#include <algorithm>

#include "../step.h"
#include "ahead.h"
#include "parallel.h"

using namespace shardlight;

namespace {

// Values go round, by loops like those of steps. fp32 takes part by one subtraction: a load whose value is not used would
// not be compiled.
FOR_EACH_PROCESSOR void traffic_f32(float* __restrict p, const float* __restrict g, float* __restrict a,
                                    float* __restrict b, size_t n) {
    auto move = [&](size_t i) __attribute__((always_inline)) {
        const float kept = p[i];
        p[i] = a[i], a[i] = b[i], b[i] = g[i] - kept;
    };
    size_t i = 0;
    for (; i + kChunk <= n; i += kChunk) {
        fetch_ahead(p, i), fetch_ahead(g, i), fetch_ahead(a, i), fetch_ahead(b, i);
        for (size_t k = 0; k < kChunk; ++k) move(i + k);
    }
    for (; i < n; ++i) move(i);
}
FOR_EACH_PROCESSOR void traffic_16(float* __restrict p, const uint16_t* __restrict g, float* __restrict a,
                                   float* __restrict b, uint16_t* __restrict copy, size_t n) {
    auto move = [&](size_t i) __attribute__((always_inline)) {
        const float kept = p[i];
        p[i] = a[i], a[i] = b[i], b[i] = kept, copy[i] = g[i];
    };
    size_t i = 0;
    for (; i + kChunk <= n; i += kChunk) {
        fetch_ahead(p, i), fetch_ahead(g, i), fetch_ahead(a, i), fetch_ahead(b, i), fetch_ahead(copy, i);
        for (size_t k = 0; k < kChunk; ++k) move(i + k);
    }
    for (; i < n; ++i) move(i);
}

}  // namespace

// The traffic of AdamW over n elements. copy null: fp32, 4 loads and 3 stores. Else gradients and copy have 16 bits.
extern "C" void ops_traffic(float* p, const void* g, float* a, float* b, uint16_t* copy, int64_t n, int threads) {
    in_parallel(n, threads, int64_t(1) << 15, [=](int64_t first, int64_t last) {
        const size_t length = size_t(last - first);
        if (copy == nullptr)
            traffic_f32(p + first, static_cast<const float*>(g) + first, a + first, b + first, length);
        else
            traffic_16(p + first, static_cast<const uint16_t*>(g) + first, a + first, b + first, copy + first, length);
    });
}
