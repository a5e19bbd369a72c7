// Passes over a flat buffer of gradients: sums over ranks, squares, scaling, casts. See ops/sums.py; the results are
// those of csrc/cpu/sums.cpp to the bit.

#include "elements.cuh"

using namespace shardlight;

namespace {

constexpr int kLanes = 16, kBlock = 1024;  // as in csrc/cpu/sums.cpp: they fix the order of a sum
constexpr int kParts = 480;                // pointers that fit into a kernel's arguments

__device__ void count(int64_t* total, int mine) {
    for (int half = 16; half; half /= 2) mine += __shfl_down_sync(0xFFFFFFFF, mine, half);
    using Counter = unsigned long long;
    if (mine && threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<Counter*>(total), Counter(mine));
}

// A chunk is summed by kLanes threads, each as one lane of the CPU's loop.
template <class T, class S>
__global__ void __launch_bounds__(kThreads) square_kernel(const S* flat, int64_t n, int64_t chunk, int64_t chunks,
                                                          T scale, T clip, double* sums, int64_t* bad) {
    const int64_t c = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int lane = threadIdx.x % kLanes;
    const int64_t begin = c * chunk, end = begin + chunk < n ? begin + chunk : n;
    int not_finite = 0;
    double total = 0;
    // Blocks of a chunk are added in order. All threads of a warp come together to add, whatever chunk is theirs.
    for (int64_t offset = 0; offset < chunk; offset += kBlock) {
        const int64_t first = begin + offset, limit = first + kBlock < end ? first + kBlock : end;
        double sum = 0;
        if (c < chunks) {
#pragma unroll 8
            for (int64_t i = first + lane; i < limit; i += kLanes) {
                const T value = T(wide(flat[i])) * scale * clip;
                sum += double(value) * double(value);
                not_finite += value - value != T(0);
            }
        }
        for (int half = kLanes / 2; half; half /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, half, kLanes);
        if (first < end) total += sum;
    }
    if (c < chunks && lane == 0) sums[c] = total;
    count(bad, not_finite);
}

template <class T>
__global__ void __launch_bounds__(kThreads) scale_kernel(void* flat, int dtype, int64_t n, T by, bool aligned,
                                                         int64_t* bad) {
    int not_finite = 0;
    for_part(blockIdx.x, n, aligned, [&](auto part) {
        T x[kEach];
        load<Any>(flat, dtype, part, x);
#pragma unroll
        for (int k = 0; k < kEach; ++k) x[k] *= by;
        store<Any>(x, flat, dtype, part);
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            // What is infinite only as it is kept, in 16 bits, counts too.
            T kept = x[k];
            if constexpr (std::is_same_v<T, float>) {
                if (dtype == BF16) kept = BFloat16::narrow(kept).wide();
                if (dtype == F16) kept = Float16::narrow(kept).wide();
            }
            not_finite += part.has(k) && kept - kept != T(0);
        }
    });
    count(bad, not_finite);
}

template <class T>
__global__ void __launch_bounds__(kThreads) cast_kernel(const void* from, int from_dtype, void* to, int to_dtype,
                                                        int64_t n, bool aligned) {
    for_part(blockIdx.x, n, aligned, [&](auto part) {
        T x[kEach];
        load<Any>(from, from_dtype, part, x);
        store<Any>(x, to, to_dtype, part);
    });
}

struct Parts {
    const void* at[kParts];
    int count;
};

// Sums of integers wrap around, as PyTorch's do.
template <class A> __device__ A plus(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
        using U = std::make_unsigned_t<A>;
        return A(U(U(a) + U(b)));
    } else {
        return a + b;
    }
}

template <class T, class O, class A>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Parts parts, O* out, int64_t n, bool add,
                                                       bool aligned) {
    for_part(blockIdx.x, n, aligned, [&](auto part) {
        A sum[kEach], more[kEach];
        load<T>(parts.at[0], 0, part, sum);
        for (int p = 1; p < parts.count; ++p) {
            load<T>(parts.at[p], 0, part, more);
#pragma unroll
            for (int k = 0; k < kEach; ++k) sum[k] = plus<A>(sum[k], more[k]);
        }
        if (add) {
            load<O>(out, 0, part, more);
#pragma unroll
            for (int k = 0; k < kEach; ++k) sum[k] = plus<A>(more[k], sum[k]);
        }
        store<O>(sum, out, 0, part);
    });
}

template <class T, class O, class A>
int sum_as(const void* const* from, int count, int from_dtype, void* out, int to_dtype, int64_t n, int add,
           void* stream) {
    Parts parts;
    parts.count = count;
    bool fits = aligned(out, to_dtype);
    for (int p = 0; p < count; ++p) parts.at[p] = from[p], fits = fits && aligned(from[p], from_dtype);
    return queue(sum_kernel<T, O, A>, blocks_for(n), stream, parts, static_cast<O*>(out), n, add != 0, fits);
}

template <class T, class S>
int square_as(const void* flat, int64_t n, int64_t chunk, double scale, double clip, double* sums, int64_t* bad,
              void* stream) {
    const int64_t chunks = (n + chunk - 1) / chunk;
    const int64_t blocks = (chunks * kLanes + kThreads - 1) / kThreads;
    const S* from = static_cast<const S*>(flat);
    return queue(square_kernel<T, S>, blocks, stream, from, n, chunk, chunks, T(scale), T(clip), sums, bad);
}

}  // namespace

// All return 0, -1 for dtypes that there is nothing for, or CUDA's error; all are queued on the stream, and none waits.

// Writes the sum of squares of each chunk, of values multiplied by `scale` and then by `clip`; adds to `bad` how many of
// them are not finite. `sums` and `bad` are on the device.
EXPORTED int cuda_square_sums(const void* flat, int dtype, int64_t n, int64_t chunk, double scale, double clip,
                                double* sums, int64_t* bad, void* stream) {
    if (!floating(dtype) || chunk < 1) return -1;
    if (!n) return 0;
    switch (dtype) {
        case F64: return square_as<double, double>(flat, n, chunk, scale, clip, sums, bad, stream);
        case BF16: return square_as<float, BFloat16>(flat, n, chunk, scale, clip, sums, bad, stream);
        case F16: return square_as<float, Float16>(flat, n, chunk, scale, clip, sums, bad, stream);
        default: return square_as<float, float>(flat, n, chunk, scale, clip, sums, bad, stream);
    }
}

// Multiplies in place; adds to `bad` how many values are not finite then.
EXPORTED int cuda_scale(void* flat, int dtype, int64_t n, double by, int64_t* bad, void* stream) {
    if (!floating(dtype)) return -1;
    if (!n) return 0;
    const int64_t blocks = blocks_for(n);
    const bool fits = aligned(flat, dtype);
    if (dtype == F64) return queue(scale_kernel<double>, blocks, stream, flat, dtype, n, by, fits, bad);
    return queue(scale_kernel<float>, blocks, stream, flat, dtype, n, float(by), fits, bad);
}

// Writes numbers of one dtype as another.
EXPORTED int cuda_cast(const void* from, int from_dtype, void* to, int to_dtype, int64_t n, void* stream) {
    if (!floating(from_dtype) || !floating(to_dtype)) return -1;
    if (!n) return 0;
    const bool fits = aligned(from, from_dtype) && aligned(to, to_dtype);
    const auto kernel = from_dtype == F64 || to_dtype == F64 ? cast_kernel<double> : cast_kernel<float>;
    return queue(kernel, blocks_for(n), stream, from, from_dtype, to, to_dtype, n, fits);
}

// out = ((parts[0] + parts[1]) + parts[2]) + ..., or out + that. At most kParts parts.
EXPORTED int cuda_sum(const void* const* parts, int count, int from, void* out, int to, int64_t n, int add,
                        void* stream) {
    if (count < 1 || count > kParts) return -1;
    if (!n) return 0;
    auto are = [&](int a, int b) { return from == a && to == b; };
    if (are(F32, F32)) return sum_as<float, float, float>(parts, count, from, out, to, n, add, stream);
    if (are(F64, F64)) return sum_as<double, double, double>(parts, count, from, out, to, n, add, stream);
    if (are(BF16, BF16)) return sum_as<BFloat16, BFloat16, float>(parts, count, from, out, to, n, add, stream);
    if (are(F16, F16)) return sum_as<Float16, Float16, float>(parts, count, from, out, to, n, add, stream);
    if (are(I8, I8)) return sum_as<int8_t, int8_t, int8_t>(parts, count, from, out, to, n, add, stream);
    if (are(U8, U8)) return sum_as<uint8_t, uint8_t, uint8_t>(parts, count, from, out, to, n, add, stream);
    if (are(I16, I16)) return sum_as<int16_t, int16_t, int16_t>(parts, count, from, out, to, n, add, stream);
    if (are(I32, I32)) return sum_as<int32_t, int32_t, int32_t>(parts, count, from, out, to, n, add, stream);
    if (are(I64, I64)) return sum_as<int64_t, int64_t, int64_t>(parts, count, from, out, to, n, add, stream);
    if (are(BF16, F32)) return sum_as<BFloat16, float, float>(parts, count, from, out, to, n, add, stream);
    if (are(F16, F32)) return sum_as<Float16, float, float>(parts, count, from, out, to, n, add, stream);
    if (are(F32, F64)) return sum_as<float, double, double>(parts, count, from, out, to, n, add, stream);
    return -1;
}
