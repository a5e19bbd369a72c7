// An optimizer's step on CUDA: the tensors of a batch in few launches, each element read and written once.
//
// Where tensors lie goes along as arguments of the kernel, so that nothing is copied to the device beforehand, and host
// arrays may be gone when it runs.

#pragma once

#include "../step.h"
#include "elements.cuh"

namespace shardlight {

constexpr size_t kArgumentBytes = 4096;  // what every driver takes

template <class R> struct Tensor {
    R rule;
    int64_t numel;
    void* parameter;
    const void* gradient;
    void* state[kStates];
    void* copy;
    bool aligned;
};

// Some tensors of one launch. Tensor i has the blocks from end[i - 1] to end[i].
template <class T, class R> struct Launch {
    static constexpr int kMost = int((kArgumentBytes - 64) / (sizeof(Tensor<R>) + sizeof(uint32_t)));
    Tensor<R> tensors[kMost];
    uint32_t end[kMost];
    T scale, clip;
    int32_t count, parameter_dtype, gradient_dtype, state_dtype, copy_dtype;
};

// Parameters are kept as P, gradients as G, states as S, and copied as C.
template <class T, class P, class G, class S, class C, class R, int kUses>
__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ Launch<T, R> launch) {
    int low = 0, high = launch.count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (blockIdx.x < launch.end[middle]) high = middle;
        else low = middle + 1;
    }
    const auto& tensor = launch.tensors[low];
    for_part(blockIdx.x - (low ? launch.end[low - 1] : 0), tensor.numel, tensor.aligned, [&](auto part) {
        T p[kEach], g[kEach], s[kStates][kEach] = {};
        load<P>(tensor.parameter, launch.parameter_dtype, part, p);
        load<G>(tensor.gradient, launch.gradient_dtype, part, g);
#pragma unroll
        for (int i = 0; i < kStates; ++i)
            if (kUses >> i & 1) load<S>(tensor.state[i], launch.state_dtype, part, s[i]);
        const R rule = tensor.rule;
#pragma unroll
        for (int k = 0; k < kEach; ++k) rule(p[k], g[k] * launch.scale * launch.clip, s[0][k], s[1][k], s[2][k]);
        store<P>(p, tensor.parameter, launch.parameter_dtype, part);
#pragma unroll
        for (int i = 0; i < kStates; ++i)
            if (kUses >> i & 1) store<S>(s[i], tensor.state[i], launch.state_dtype, part);
        if constexpr (!std::is_same_v<C, None>) store<C>(p, tensor.copy, launch.copy_dtype, part);
    });
}

inline bool copies(const Step& step, int64_t i) { return step.copy != nullptr && step.copy[i] != nullptr; }

// Steps the tensors that are copied, or those that are not.
template <class T, class P, class G, class S, class C, template <class, int> class Rule, int kUses>
int step_some(const Step& step) {
    using R = Rule<T, kUses>;
    using Arguments = Launch<T, R>;
    static_assert(sizeof(Arguments) <= kArgumentBytes, "too many tensors");
    constexpr bool kCopies = !std::is_same_v<C, None>;
    Arguments given{};
    given.scale = T(step.scale), given.clip = T(step.clip);
    given.parameter_dtype = step.parameter_dtype, given.gradient_dtype = step.gradient_dtype;
    given.state_dtype = step.state_dtype, given.copy_dtype = step.copy_dtype;
    for (int64_t i = 0; i < step.count; ++i) {
        if (step.numel[i] && copies(step, i) == kCopies) {
            auto& tensor = given.tensors[given.count];
            tensor.rule = R::of(step.options, step.number[i]);
            tensor.numel = step.numel[i];
            tensor.parameter = step.parameter[i], tensor.gradient = step.gradient[i];
            tensor.copy = kCopies ? step.copy[i] : nullptr;
            tensor.aligned = aligned(tensor.parameter, step.parameter_dtype) &&
                             aligned(tensor.gradient, step.gradient_dtype) &&
                             (!kCopies || aligned(tensor.copy, step.copy_dtype));
            for (int n = 0; n < kStates; ++n)
                if (kUses >> n & 1) {
                    tensor.state[n] = step.state[n][i];
                    tensor.aligned = tensor.aligned && aligned(tensor.state[n], step.state_dtype);
                }
            const uint32_t before = given.count ? given.end[given.count - 1] : 0;
            given.end[given.count++] = before + uint32_t(blocks_for(tensor.numel));
        }
        if (given.count == Arguments::kMost || (given.count && i == step.count - 1)) {
            const int64_t blocks = given.end[given.count - 1];
            const int error = queue(step_kernel<T, P, G, S, C, R, kUses>, blocks, step.stream, given);
            if (error) return error;
            given.count = 0;
        }
    }
    return 0;
}

// What trains in 16 bits has kernels of its own for common mixes of dtypes; the rest looks at dtypes as it runs.
template <template <class, int> class Rule, int kUses, bool kCopies> int step_these(const Step& step) {
    using B = BFloat16;
    using Copy = std::conditional_t<kCopies, Any, None>;
    if (step.parameter_dtype == F64) return step_some<double, Any, Any, Any, Copy, Rule, kUses>(step);
    auto are = [&](int p, int g, int s, int c) {
        return step.parameter_dtype == p && step.gradient_dtype == g && step.state_dtype == s &&
               (!kCopies || step.copy_dtype == c);
    };
    if constexpr (!kCopies) {
        if (are(F32, F32, F32, 0)) return step_some<float, float, float, float, None, Rule, kUses>(step);
        if constexpr (Rule<float, kUses>::kTrainsIn16) {
            if (are(F32, F32, BF16, 0)) return step_some<float, float, float, B, None, Rule, kUses>(step);
            if (are(BF16, BF16, BF16, 0)) return step_some<float, B, B, B, None, Rule, kUses>(step);
        }
    } else if constexpr (Rule<float, kUses>::kTrainsIn16) {
        if (are(F32, F32, F32, BF16)) return step_some<float, float, float, float, B, Rule, kUses>(step);
        if (are(F32, BF16, F32, BF16)) return step_some<float, float, B, float, B, Rule, kUses>(step);
        if (are(F32, F32, BF16, BF16)) return step_some<float, float, float, B, B, Rule, kUses>(step);
    }
    return step_some<float, Any, Any, Any, Copy, Rule, kUses>(step);
}

// Returns 0, kNotForThese, or CUDA's error.
template <template <class, int> class Rule, int kUses> int step_all(const Step& step) {
    for (int i = 0; i < kStates; ++i)
        if ((kUses >> i & 1) && step.state[i] == nullptr) return kNotForThese;
    for (int dtype : {step.parameter_dtype, step.gradient_dtype, step.state_dtype, step.copy_dtype})
        if (!floating(dtype)) return kNotForThese;
    const bool wide = step.parameter_dtype == F64;
    if (!wide && (step.gradient_dtype == F64 || step.state_dtype == F64)) return kNotForThese;
    bool some = false, others = false;
    for (int64_t i = 0; i < step.count; ++i) (copies(step, i) ? some : others) = true;
    int error = 0;
    if (others) error = step_these<Rule, kUses, false>(step);
    if (some && !error) error = step_these<Rule, kUses, true>(step);
    return error;
}

}  // namespace shardlight
