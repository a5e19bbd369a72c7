// Adagrad (Duchi, Hazan & Singer 2011) in torch.optim's form and order of operations. State: the sum of squares.

#pragma once

#include "step.h"

namespace shardlight {

template <class T, int kUses> struct Adagrad {
    static constexpr bool kTrainsIn16 = false;
    T rate, decay, eps;

    // options: lr, decay of the learning rate, weight decay, eps.
    static Adagrad of(const double* options, double number) {
        return {T(options[0] / (1 + (number - 1) * options[1])), T(options[2]), T(options[3])};
    }

    ANYWHERE void operator()(T& p, T g, T& sum, T&, T&) const {
        g = decay != T(0) ? g + decay * p : g;
        sum = sum + g * g;
        p = p - rate * (g / (std::sqrt(sum) + eps));
    }
};

}  // namespace shardlight
