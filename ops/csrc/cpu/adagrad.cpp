#include "../adagrad.h"
#include "step_loop.h"

using namespace shardlight;

// uses: which of the states are there.
extern "C" int ops_adagrad(const Step* step, int uses) {
    switch (uses) {
        case kUseA: return step_all<Adagrad, kUseA>(*step);
        default: return kNotForThese;
    }
}
