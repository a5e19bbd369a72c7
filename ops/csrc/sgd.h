// SGD with momentum (Sutskever et al. 2013) in torch.optim's form and order of operations. State: the momentum.

#pragma once

#include "step.h"

namespace shardlight {

template <class T, int kUses> struct Sgd {
    static constexpr bool kTrainsIn16 = true;
    T lr, decay, momentum, fresh, nesterov, first;

    // options: lr, momentum, dampening, weight decay, whether Nesterov's. The first step of a tensor has number 1.
    static Sgd of(const double* options, double number) {
        return {T(options[0]), T(options[3]), T(options[1]), T(1 - options[2]),
                options[4] != 0 ? T(1) : T(0), number == 1 ? T(1) : T(0)};
    }

    ANYWHERE void operator()(T& p, T g, T& buffer, T&, T&) const {
        g = decay != T(0) ? g + decay * p : g;
        if constexpr ((kUses & kUseA) != 0) {
            buffer = first != T(0) ? g : buffer * momentum + fresh * g;
            g = nesterov != T(0) ? g + momentum * buffer : buffer;
        }
        p = p - lr * g;
    }
};

}  // namespace shardlight
