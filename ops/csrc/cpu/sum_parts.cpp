#include "sum_parts.h"

namespace shardlight {

namespace {

// Sums of integers wrap around, as PyTorch's do.
template <class T> inline T plus(T a, T b) { return a + b; }
template <> inline int32_t plus(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
template <> inline int64_t plus(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }

constexpr size_t kSumBlock = 2048;  // elements whose sum stays in the first cache

template <class T, class A> inline __attribute__((always_inline)) void add_block(const T* part, A* sum, size_t n) {
    for (size_t i = 0; i < n; ++i) sum[i] = plus<A>(sum[i], A(wide(part[i])));
}

// out = ((parts[0] + parts[1]) + parts[2]) + ..., added up as A; with `add` this sum is added to out.
template <class T, class O, class A>
inline __attribute__((always_inline)) void sum_parts(const void* const* parts, int count, void* out, size_t n, bool add) {
    A sum[kSumBlock];
    O* target = static_cast<O*>(out);
    for (size_t first = 0; first < n; first += kSumBlock) {
        size_t length = n - first < kSumBlock ? n - first : kSumBlock;
        const T* part = static_cast<const T*>(parts[0]) + first;
        for (size_t i = 0; i < length; ++i) sum[i] = A(wide(part[i]));
        for (int p = 1; p < count; ++p) add_block<T, A>(static_cast<const T*>(parts[p]) + first, sum, length);
        if (add)
            for (size_t i = 0; i < length; ++i)
                target[first + i] = Narrow<O, A>::of(plus<A>(A(wide(target[first + i])), sum[i]));
        else
            for (size_t i = 0; i < length; ++i) target[first + i] = Narrow<O, A>::of(sum[i]);
    }
}

#define SUM(name, T, O, A)                                                                                   \
    FOR_EACH_PROCESSOR void name(const void* const* parts, int count, void* out, size_t n, bool add) {        \
        sum_parts<T, O, A>(parts, count, out, n, add);                                                       \
    }
SUM(sum_f32, float, float, float)
SUM(sum_f64, double, double, double)
SUM(sum_bf16, BFloat16, BFloat16, float)
SUM(sum_f16, Float16, Float16, float)
SUM(sum_i8, int8_t, int8_t, int8_t)
SUM(sum_u8, uint8_t, uint8_t, uint8_t)
SUM(sum_i16, int16_t, int16_t, int16_t)
SUM(sum_i32, int32_t, int32_t, int32_t)
SUM(sum_i64, int64_t, int64_t, int64_t)
SUM(sum_bf16_f32, BFloat16, float, float)
SUM(sum_f16_f32, Float16, float, float)
SUM(sum_f32_f64, float, double, double)
#undef SUM

}  // namespace

Sum sum_of(int from, int to) {
    if (from == to) {
        constexpr Sum same[] = {sum_f32, sum_f64, sum_bf16, sum_f16, sum_i8, sum_u8, sum_i16, sum_i32, sum_i64};
        return same[from];
    }
    if (from == BF16 && to == F32) return sum_bf16_f32;
    if (from == F16 && to == F32) return sum_f16_f32;
    if (from == F32 && to == F64) return sum_f32_f64;
    return nullptr;
}

}  // namespace shardlight
