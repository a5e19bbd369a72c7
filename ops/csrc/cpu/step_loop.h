// An optimizer's step on CPU: every tensor in blocks, each read and written once.

#pragma once

#include <algorithm>
#include <type_traits>

#include "../step.h"
#include "ahead.h"
#include "convert.h"
#include "parallel.h"

namespace shardlight {

constexpr int64_t kPerThread = 1 << 15;  // elements below which a thread costs more than it does

struct None {};

// One pass over n elements: parameters are kept as P, gradients as G, states as S, and copied as C.
template <class T, class P, class G, class S, class C, class Rule, int kUses>
FOR_EACH_PROCESSOR void step_block(const Rule& given, T scale, T clip, size_t n, P* __restrict p, const G* __restrict g,
                                   S* __restrict a, S* __restrict b, S* __restrict c, C* __restrict copy) {
    const Rule rule = given;
    auto update = [&](size_t i) __attribute__((always_inline)) {
        T x = T(wide(p[i])), s[kStates] = {};
        if constexpr ((kUses & kUseA) != 0) s[0] = T(wide(a[i]));
        if constexpr ((kUses & kUseB) != 0) s[1] = T(wide(b[i]));
        if constexpr ((kUses & kUseC) != 0) s[2] = T(wide(c[i]));
        rule(x, T(wide(g[i])) * scale * clip, s[0], s[1], s[2]);
        p[i] = Narrow<P, T>::of(x);
        if constexpr ((kUses & kUseA) != 0) a[i] = Narrow<S, T>::of(s[0]);
        if constexpr ((kUses & kUseB) != 0) b[i] = Narrow<S, T>::of(s[1]);
        if constexpr ((kUses & kUseC) != 0) c[i] = Narrow<S, T>::of(s[2]);
        if constexpr (!std::is_same_v<C, None>) copy[i] = Narrow<C, T>::of(x);
    };
    size_t i = 0;
    for (; i + kChunk <= n; i += kChunk) {
        fetch_ahead(p, i), fetch_ahead(g, i);
        if constexpr ((kUses & kUseA) != 0) fetch_ahead(a, i);
        if constexpr ((kUses & kUseB) != 0) fetch_ahead(b, i);
        if constexpr ((kUses & kUseC) != 0) fetch_ahead(c, i);
        if constexpr (!std::is_same_v<C, None>) fetch_ahead(copy, i);
        for (size_t k = 0; k < kChunk; ++k) update(i + k);
    }
    for (; i < n; ++i) {
        update(i);
        __asm__ volatile("");  // one by one: the few that are left are not worth another loop's compilation
    }
}

// Elements [first, last) of one tensor, whose dtypes are known here.
template <class T, class P, class G, class S, class C, template <class, int> class Rule, int kUses>
void step_range(const Step& step, int64_t tensor, int64_t first, int64_t last) {
    const auto rule = Rule<T, kUses>::of(step.options, step.number[tensor]);
    S* s[kStates] = {};
    for (int i = 0; i < kStates; ++i)
        if (kUses >> i & 1) s[i] = static_cast<S*>(step.state[i][tensor]) + first;
    C* copy = nullptr;
    if constexpr (!std::is_same_v<C, None>) copy = static_cast<C*>(step.copy[tensor]) + first;
    step_block<T, P, G, S, C, Rule<T, kUses>, kUses>(
        rule, T(step.scale), T(step.clip), size_t(last - first), static_cast<P*>(step.parameter[tensor]) + first,
        static_cast<const G*>(step.gradient[tensor]) + first, s[0], s[1], s[2], copy);
}

// The same for all other dtypes: loaded and stored in blocks that stay in the first cache.
template <class T, template <class, int> class Rule, int kUses>
void step_staged(const Step& step, int64_t tensor, int64_t first, int64_t last) {
    const auto rule = Rule<T, kUses>::of(step.options, step.number[tensor]);
    T stage[2 + kStates][kBlock];
    for (; first < last; first += int64_t(kBlock)) {
        const size_t n = size_t(std::min<int64_t>(last - first, int64_t(kBlock)));
        void* parameter = at(step.parameter[tensor], first, step.parameter_dtype);
        T* p = const_cast<T*>(load<T>(parameter, step.parameter_dtype, n, stage[0]));
        const T* g = load<T>(at(step.gradient[tensor], first, step.gradient_dtype), step.gradient_dtype, n, stage[1]);
        void* states[kStates] = {};
        T* s[kStates] = {};
        for (int i = 0; i < kStates; ++i)
            if (kUses >> i & 1) {
                states[i] = at(step.state[i][tensor], first, step.state_dtype);
                s[i] = const_cast<T*>(load<T>(states[i], step.state_dtype, n, stage[2 + i]));
            }
        None* none = nullptr;
        step_block<T, T, T, T, None, Rule<T, kUses>, kUses>(rule, T(step.scale), T(step.clip), n, p, g, s[0], s[1], s[2],
                                                            none);
        if (step.copy != nullptr && step.copy[tensor] != nullptr)
            store(p, at(step.copy[tensor], first, step.copy_dtype), step.copy_dtype, n);
        store(p, parameter, step.parameter_dtype, n);
        for (int i = 0; i < kStates; ++i)
            if (kUses >> i & 1) store(s[i], states[i], step.state_dtype, n);
    }
}

using Range = void (*)(const Step&, int64_t tensor, int64_t first, int64_t last);

// What trains in 16 bits goes through registers, as fp32 does; the rest through blocks.
template <template <class, int> class Rule, int kUses> Range range_of(const Step& step, int64_t tensor) {
    using B = BFloat16;
    if (step.parameter_dtype == F64) return step_staged<double, Rule, kUses>;
    if constexpr (!Rule<float, kUses>::kTrainsIn16) return step_staged<float, Rule, kUses>;
    const bool copies = step.copy != nullptr && step.copy[tensor] != nullptr;
    auto are = [&](int p, int g, int s, int c) {
        return step.parameter_dtype == p && step.gradient_dtype == g && step.state_dtype == s &&
               (copies ? step.copy_dtype : -1) == c;
    };
    if (are(F32, F32, F32, -1)) return step_range<float, float, float, float, None, Rule, kUses>;
    if (are(F32, F32, F32, BF16)) return step_range<float, float, float, float, B, Rule, kUses>;
    if (are(F32, BF16, F32, BF16)) return step_range<float, float, B, float, B, Rule, kUses>;
    if (are(F32, F32, BF16, -1)) return step_range<float, float, float, B, None, Rule, kUses>;
    if (are(F32, F32, BF16, BF16)) return step_range<float, float, float, B, B, Rule, kUses>;
    if (are(BF16, BF16, BF16, -1)) return step_range<float, B, B, B, None, Rule, kUses>;
    return step_staged<float, Rule, kUses>;
}

template <template <class, int> class Rule, int kUses> int step_all(const Step& step) {
    for (int i = 0; i < kStates; ++i)
        if ((kUses >> i & 1) && step.state[i] == nullptr) return kNotForThese;
    for (int dtype : {step.parameter_dtype, step.gradient_dtype, step.state_dtype, step.copy_dtype})
        if (dtype < F32 || dtype > F16) return kNotForThese;
    const bool wide = step.parameter_dtype == F64;
    if (!wide && (step.gradient_dtype == F64 || step.state_dtype == F64)) return kNotForThese;
    int64_t total = 0;
    for (int64_t i = 0; i < step.count; ++i) total += step.numel[i];
    in_parallel(total, step.threads, kPerThread, [&](int64_t first, int64_t last) {
        for (int64_t i = 0; i < step.count && first < last; ++i) {
            const int64_t n = step.numel[i];
            const int64_t from = std::min(first, n), to = std::min(last, n);
            if (from < to) range_of<Rule, kUses>(step, i)(step, i, from, to);
            first = std::max<int64_t>(first - n, 0), last -= n;
        }
    });
    return 0;
}

}  // namespace shardlight
