// The numbers that ops compute with, on CPU and CUDA: the same bits everywhere. Knows no PyTorch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ANYWHERE __host__ __device__ __forceinline__
#else
#define ANYWHERE inline __attribute__((always_inline))
#endif

// One binary serves every processor: the loader takes what this one can do. Without contraction into fused
// multiply-adds (see the flags of the build) all of them give the same bits. With avx512f alone 16-bit numbers would keep
// their loops from the widest registers. Sanitizers start after the choice among clones.
#if !defined(FOR_EACH_PROCESSOR)
#if !defined(__x86_64__) || defined(__CUDACC__) || defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_PROCESSOR
#elif !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif

namespace shardlight {

constexpr int kAbi = 3;  // what the functions take, as ABI in ops/built.py

// As in ops/native.py.
enum Dtype : int { F32, F64, BF16, F16, I8, U8, I16, I32, I64 };
inline size_t width(int dtype) {
    constexpr size_t widths[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    return widths[dtype];
}

struct BFloat16 {
    uint16_t bits;
    ANYWHERE float wide() const {
        uint32_t word = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &word, 4);
        return value;
    }
    ANYWHERE static BFloat16 narrow(float value) {
        uint32_t word;
        std::memcpy(&word, &value, 4);
        // Chosen among 32-bit numbers: not every processor with wide registers compares 16-bit ones in them.
        uint32_t nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
        uint32_t found = value != value ? 0x7FC0 : nearest;
        return {uint16_t(found)};
    }
};

struct Float16 {
    uint16_t bits;
    ANYWHERE float wide() const {
        uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7FFF;
        // Exponent and fraction in their places of a float; the bias is corrected by a multiplication, which also
        // makes subnormal numbers normal.
        uint32_t word = rest << 13;
        float value, scale;
        uint32_t power = 0x77800000;  // 2^112
        std::memcpy(&value, &word, 4);
        std::memcpy(&scale, &power, 4);
        value *= scale;
        std::memcpy(&word, &value, 4);
        uint32_t special = 0x7F800000 | (rest << 13 & 0x7FFFFF);
        word = sign | (rest >= 0x7C00 ? special : word);
        std::memcpy(&value, &word, 4);
        return value;
    }
    ANYWHERE static Float16 narrow(float value) {
        uint32_t word;
        std::memcpy(&word, &value, 4);
        uint32_t sign = word >> 16 & 0x8000;
        uint32_t rest = word & 0x7FFFFFFF;
        // Subnormal results: adding 0.5 lets the sum round at the right place.
        float small;
        std::memcpy(&small, &rest, 4);
        small += 0.5f;
        uint32_t below;
        std::memcpy(&below, &small, 4);
        below -= 0x3F000000;
        uint32_t normal = (rest + 0xC8000FFF + (rest >> 13 & 1)) >> 13;
        uint32_t found = rest < 0x38800000 ? below : normal;
        found = rest >= 0x477FF000 ? 0x7C00 : found;
        found = rest > 0x7F800000 ? 0x7E00 : found;
        return {uint16_t(sign | found)};
    }
};

template <class T> ANYWHERE T wide(T value) { return value; }
ANYWHERE float wide(BFloat16 value) { return value.wide(); }
ANYWHERE float wide(Float16 value) { return value.wide(); }
template <class O, class T> struct Narrow {
    ANYWHERE static O of(T value) { return O(value); }
};
template <class T> struct Narrow<BFloat16, T> {
    ANYWHERE static BFloat16 of(T value) { return BFloat16::narrow(float(value)); }
};
template <class T> struct Narrow<Float16, T> {
    ANYWHERE static Float16 of(T value) { return Float16::narrow(float(value)); }
};

}  // namespace shardlight
