// Loading and storing of numbers as the type that is computed with, in blocks that stay in the first cache.

#pragma once

#include <type_traits>

#include "../numbers.h"

namespace shardlight {

constexpr size_t kBlock = 1024;

template <class S, class T> FOR_EACH_PROCESSOR void widen(const S* from, T* to, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = T(wide(from[i]));
}
template <class T, class D> FOR_EACH_PROCESSOR void narrow(const T* from, D* to, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = Narrow<D, T>::of(from[i]);
}

template <class T> constexpr int dtype_of();
template <> constexpr int dtype_of<float>() { return F32; }
template <> constexpr int dtype_of<double>() { return F64; }

template <class P> P* at(P* base, int64_t first, int dtype) {
    if constexpr (std::is_const_v<P>) return static_cast<const char*>(base) + first * int64_t(width(dtype));
    else return static_cast<char*>(base) + first * int64_t(width(dtype));
}

// Returns n numbers as T: where they are, or widened into `stage`.
template <class T> const T* load(const void* from, int dtype, size_t n, T* stage) {
    if (dtype == dtype_of<T>()) return static_cast<const T*>(from);
    switch (dtype) {
        case F32: widen(static_cast<const float*>(from), stage, n); break;
        case F64: widen(static_cast<const double*>(from), stage, n); break;
        case BF16: widen(static_cast<const BFloat16*>(from), stage, n); break;
        case F16: widen(static_cast<const Float16*>(from), stage, n); break;
    }
    return stage;
}

// Puts n numbers where they belong, unless they were computed there.
template <class T> void store(const T* from, void* to, int dtype, size_t n) {
    if (from == to) return;
    switch (dtype) {
        case F32: narrow(from, static_cast<float*>(to), n); break;
        case F64: narrow(from, static_cast<double*>(to), n); break;
        case BF16: narrow(from, static_cast<BFloat16*>(to), n); break;
        case F16: narrow(from, static_cast<Float16*>(to), n); break;
    }
}

}  // namespace shardlight
