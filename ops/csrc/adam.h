// Adam and AdamW (Kingma & Ba 2015, arXiv 1412.6980, Algorithm 1; Loshchilov & Hutter 2019, arXiv 1711.05101,
// Algorithm 2) in torch.optim's order of operations. States: first moment, second moment, and its maximum with AMSGrad.

#pragma once

#include "step.h"

namespace shardlight {

template <class T, int kUses> struct Adam {
    static constexpr bool kTrainsIn16 = true;
    T keep, decay, weight, left, beta2, fresh, eps, unroot, size, near;

    // options: lr, beta1, beta2, eps, weight decay, whether it is decoupled.
    static Adam of(const double* options, double number) {
        double lr = options[0], beta1 = options[1], beta2 = options[2], decay = options[4];
        bool decoupled = options[5] != 0;
        Adam rule;
        rule.keep = T(decoupled ? 1 - lr * decay : 1.0);
        rule.decay = T(decoupled ? 0.0 : decay);
        rule.weight = T(1 - beta1);
        rule.left = T(1) - rule.weight;
        rule.near = std::fabs(1 - beta1) < 0.5 ? T(1) : T(0);
        rule.beta2 = T(beta2);
        rule.fresh = T(1 - beta2);
        rule.eps = T(options[3]);
        rule.unroot = T(1 / std::sqrt(1 - std::pow(beta2, number)));
        rule.size = T(lr / (1 - std::pow(beta1, number)));
        return rule;
    }

    ANYWHERE void operator()(T& p, T g, T& m, T& v, T& most) const {
        p = p * keep;
        g = decay != T(0) ? g + decay * p : g;
        m = near != T(0) ? m + weight * (g - m) : g - (g - m) * left;
        v = v * beta2 + fresh * (g * g);
        T second = v;
        if constexpr ((kUses & kUseC) != 0) {
            // As torch.maximum: a NaN stays.
            most = v > most || v != v ? v : most;
            second = most;
        }
        // A product, where torch divides: a second division would take longer than memory does.
        p = p - size * (m / (std::sqrt(second) * unroot + eps));
    }
};

}  // namespace shardlight
