// Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2). State: the momentum.

#pragma once

#include "step.h"

namespace shardlight {

template <class T, int kUses> struct Lion {
    static constexpr bool kTrainsIn16 = true;
    T lr, decay, beta1, fresh1, beta2, fresh2;

    // options: lr, beta1, beta2, weight decay.
    static Lion of(const double* options, double) {
        return {T(options[0]), T(options[3]), T(options[1]), T(1 - options[1]),
                T(options[2]), T(1 - options[2])};
    }

    ANYWHERE void operator()(T& p, T g, T& momentum, T&, T&) const {
        T direction = momentum * beta1 + fresh1 * g;
        T sign = direction > T(0) ? T(1) : direction < T(0) ? T(-1) : direction;  // NaN and zero as they are
        p = p - lr * (sign + decay * p);
        momentum = momentum * beta2 + fresh2 * g;
    }
};

}  // namespace shardlight
