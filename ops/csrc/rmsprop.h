// RMSprop (Hinton 2012, lecture 6e; centred: Graves 2013, arXiv 1308.0850) in torch.optim's form and order of
// operations. States: mean square, momentum, mean.

#pragma once

#include "step.h"

namespace shardlight {

template <class T, int kUses> struct RmsProp {
    static constexpr bool kTrainsIn16 = false;
    T lr, alpha, fresh, left, eps, decay, momentum, near;

    // options: lr, alpha, eps, weight decay, momentum.
    static RmsProp of(const double* options, double) {
        RmsProp rule;
        rule.lr = T(options[0]);
        rule.alpha = T(options[1]);
        rule.fresh = T(1 - options[1]);
        rule.left = T(1) - rule.fresh;
        rule.near = std::fabs(1 - options[1]) < 0.5 ? T(1) : T(0);
        rule.eps = T(options[2]);
        rule.decay = T(options[3]);
        rule.momentum = T(options[4]);
        return rule;
    }

    ANYWHERE void operator()(T& p, T g, T& square, T& buffer, T& mean) const {
        g = decay != T(0) ? g + decay * p : g;
        square = square * alpha + fresh * (g * g);
        T spread = square;
        if constexpr ((kUses & kUseC) != 0) {
            mean = near != T(0) ? mean + fresh * (g - mean) : g - (g - mean) * left;
            spread = square - mean * mean;
        }
        T update = g / (std::sqrt(spread) + eps);
        if constexpr ((kUses & kUseB) != 0) {
            buffer = buffer * momentum + update;
            update = buffer;
        }
        p = p - lr * update;
    }
};

}  // namespace shardlight
