// Passes over a flat buffer of gradients: sums over ranks, squares, scaling, casts. See ops/sums.py and ops/casts.py.

#include <algorithm>
#include <atomic>

#include "convert.h"
#include "parallel.h"
#include "sum_parts.h"

using namespace shardlight;

namespace {

constexpr int64_t kPerThread = 1 << 16;
constexpr size_t kLanes = 16;

// The sum of squares in an order that is fixed by position, whatever the width of the processor's registers.
template <class T> FOR_EACH_PROCESSOR double square_sum(const T* x, size_t n, T scale, T clip, int64_t& bad) {
    double lanes[kLanes] = {};
    int32_t not_finite[kLanes] = {};
    const size_t whole = n / kLanes * kLanes;
    for (size_t i = 0; i < whole; i += kLanes)
        for (size_t k = 0; k < kLanes; ++k) {
            const T value = x[i + k] * scale * clip;
            lanes[k] += double(value) * double(value);
            not_finite[k] += value - value != T(0);
        }
    for (size_t i = whole; i < n; ++i) {
        const T value = x[i] * scale * clip;
        lanes[i - whole] += double(value) * double(value);
        not_finite[i - whole] += value - value != T(0);
    }
    for (size_t half = kLanes / 2; half; half /= 2)
        for (size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    for (size_t k = 0; k < kLanes; ++k) bad += not_finite[k];
    return lanes[0];
}

template <class T> FOR_EACH_PROCESSOR int64_t scale_block(T* x, size_t n, T scale) {
    int32_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
        x[i] = x[i] * scale;
        bad += x[i] - x[i] != T(0);
    }
    return bad;
}

bool floating(int dtype) { return dtype >= F32 && dtype <= F16; }

template <class T> int64_t square_sums(const void* flat, int dtype, int64_t n, int64_t chunk, double scale, double clip,
                                       double* sums, int threads) {
    std::atomic<int64_t> bad{0};
    const int64_t chunks = (n + chunk - 1) / chunk;
    in_parallel(chunks, threads, std::max<int64_t>(kPerThread / chunk, 1), [&](int64_t first, int64_t last) {
        int64_t found = 0;
        T stage[kBlock];
        for (int64_t c = first; c < last; ++c) {
            double sum = 0;
            // Where a chunk is longer than a block, its blocks are added in order.
            for (int64_t i = c * chunk; i < std::min(n, (c + 1) * chunk); i += int64_t(kBlock)) {
                const size_t length = size_t(std::min<int64_t>({n - i, (c + 1) * chunk - i, int64_t(kBlock)}));
                sum += square_sum(load<T>(at(flat, i, dtype), dtype, length, stage), length, T(scale), T(clip), found);
            }
            sums[c] = sum;
        }
        bad += found;
    });
    return bad;
}

template <class T> int64_t scale(void* flat, int dtype, int64_t n, double by, int threads) {
    std::atomic<int64_t> bad{0};
    in_parallel(n, threads, kPerThread, [&](int64_t first, int64_t last) {
        int64_t found = 0;
        T stage[kBlock];
        for (int64_t i = first; i < last; i += int64_t(kBlock)) {
            const size_t length = size_t(std::min<int64_t>(last - i, int64_t(kBlock)));
            void* there = at(flat, i, dtype);
            T* x = const_cast<T*>(load<T>(there, dtype, length, stage));
            const int64_t computed = scale_block(x, length, T(by));
            store(x, there, dtype, length);
            // What is infinite only as it is kept, in 16 bits, counts too.
            found += x == stage ? scale_block(const_cast<T*>(load<T>(there, dtype, length, stage)), length, T(1)) : computed;
        }
        bad += found;
    });
    return bad;
}

}  // namespace

extern "C" int ops_abi() { return kAbi; }

// Writes the sum of squares of each chunk, of values multiplied by `scale` and then by `clip`; returns how many of them
// are not finite, or -1 for a dtype that is none of floating point.
extern "C" int64_t ops_square_sums(const void* flat, int dtype, int64_t n, int64_t chunk, double scale, double clip,
                                   double* sums, int threads) {
    if (!floating(dtype) || chunk < 1) return -1;
    return (dtype == F64 ? square_sums<double> : square_sums<float>)(flat, dtype, n, chunk, scale, clip, sums, threads);
}

// Multiplies in place; returns how many values are not finite then, or -1.
extern "C" int64_t ops_scale(void* flat, int dtype, int64_t n, double by, int threads) {
    if (!floating(dtype)) return -1;
    return (dtype == F64 ? scale<double> : scale<float>)(flat, dtype, n, by, threads);
}

// Writes numbers of one dtype as another; returns 0, or -1.
extern "C" int ops_cast(const void* from, int from_dtype, void* to, int to_dtype, int64_t n, int threads) {
    if (!floating(from_dtype) || !floating(to_dtype)) return -1;
    in_parallel(n, threads, kPerThread, [&](int64_t first, int64_t last) {
        double wide_stage[kBlock];
        float stage[kBlock];
        for (int64_t i = first; i < last; i += int64_t(kBlock)) {
            const size_t length = size_t(std::min<int64_t>(last - i, int64_t(kBlock)));
            const void* source = at(from, i, from_dtype);
            void* target = at(to, i, to_dtype);
            if (from_dtype == F64 || to_dtype == F64)
                store(load<double>(source, from_dtype, length, wide_stage), target, to_dtype, length);
            else
                store(load<float>(source, from_dtype, length, stage), target, to_dtype, length);
        }
    });
    return 0;
}

// out = ((parts[0] + parts[1]) + parts[2]) + ..., or out + that; returns 0, or -1 for dtypes that it has no sum for.
extern "C" int ops_sum(const void* const* parts, int count, int from_dtype, void* out, int to_dtype, int64_t n, int add,
                       int threads) {
    const Sum sum = sum_of(from_dtype, to_dtype);
    if (sum == nullptr || count < 1) return -1;
    in_parallel(n, threads, kPerThread, [&](int64_t first, int64_t last) {
        std::vector<const void*> here(parts, parts + count);
        for (auto& part : here) part = at(part, first, from_dtype);
        sum(here.data(), count, at(out, first, to_dtype), size_t(last - first), add != 0);
    });
    return 0;
}
