// Which elements a thread has, and moving them between memory and registers, as the type that is computed with.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../numbers.h"

// All else is hidden: the CPU's library has functions of the same names.
#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace shardlight {

constexpr int kThreads = 256, kEach = 4;  // threads of a block, elements of a thread
constexpr int64_t kPerBlock = int64_t(kThreads) * kEach;

struct None {};  // a tensor that there is not
struct Any {};   // one whose dtype is known only at run time

// The elements of a block. kWhole: there are kPerBlock of them, and all tensors are aligned: each thread has
// neighbours, moved together. Else they lie kThreads apart, and the last may be missing.
template <bool kWhole> struct Part {
    int64_t first, count;
    __device__ bool has(int k) const { return kWhole || k * kThreads + int(threadIdx.x) < count; }
};

// Calls work(part) with the part of [0, n) that is the block's. Known before anything is loaded, so that no branch is
// between loads.
template <class Work>
__device__ __forceinline__ void for_part(int64_t block, int64_t n, bool aligned, const Work& work) {
    const int64_t first = block * kPerBlock, left = n - first;
    if (aligned && left >= kPerBlock) work(Part<true>{first, left});
    else work(Part<false>{first, left});
}

template <class S> struct alignas(sizeof(S) * kEach) Neighbours { S at[kEach]; };

// S: the dtype in memory, or Any: `dtype`.
template <class S, class T, bool kWhole>
__device__ __forceinline__ void load(const void* base, int dtype, Part<kWhole> part, T* to) {
    if constexpr (std::is_same_v<S, Any>) {
        switch (dtype) {
            case F32: return load<float>(base, dtype, part, to);
            case F64: return load<double>(base, dtype, part, to);
            case BF16: return load<BFloat16>(base, dtype, part, to);
            case F16: return load<Float16>(base, dtype, part, to);
        }
    } else {
        const S* from = static_cast<const S*>(base) + part.first;
        if constexpr (kWhole) {
            const auto found = reinterpret_cast<const Neighbours<S>*>(from)[threadIdx.x];
#pragma unroll
            for (int k = 0; k < kEach; ++k) to[k] = T(wide(found.at[k]));
        } else {
#pragma unroll
            for (int k = 0; k < kEach; ++k) to[k] = part.has(k) ? T(wide(from[k * kThreads + threadIdx.x])) : T(0);
        }
    }
}

template <class S, class T, bool kWhole>
__device__ __forceinline__ void store(const T* from, void* base, int dtype, Part<kWhole> part) {
    if constexpr (std::is_same_v<S, Any>) {
        switch (dtype) {
            case F32: return store<float>(from, base, dtype, part);
            case F64: return store<double>(from, base, dtype, part);
            case BF16: return store<BFloat16>(from, base, dtype, part);
            case F16: return store<Float16>(from, base, dtype, part);
        }
    } else {
        S* to = static_cast<S*>(base) + part.first;
        if constexpr (kWhole) {
            Neighbours<S> found;
#pragma unroll
            for (int k = 0; k < kEach; ++k) found.at[k] = Narrow<S, T>::of(from[k]);
            reinterpret_cast<Neighbours<S>*>(to)[threadIdx.x] = found;
        } else {
#pragma unroll
            for (int k = 0; k < kEach; ++k)
                if (part.has(k)) to[k * kThreads + threadIdx.x] = Narrow<S, T>::of(from[k]);
        }
    }
}

// Runs a kernel when the stream gets to it; returns CUDA's error.
template <class... A>
int queue(void (*kernel)(A...), int64_t blocks, void* stream, const std::common_type_t<A>&... given) {
#if defined(__CUDACC__)
    kernel<<<uint32_t(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(given...);
    return cudaGetLastError();
#else
    return emulate(blocks, kThreads, [&] { kernel(given...); });  // see tests/cuda_on_cpu
#endif
}

inline bool aligned(const void* base, int dtype) { return uintptr_t(base) % (width(dtype) * kEach) == 0; }
inline int64_t blocks_for(int64_t n) { return (n + kPerBlock - 1) / kPerBlock; }
inline bool floating(int dtype) { return dtype >= F32 && dtype <= F16; }

}  // namespace shardlight
