#include "../sgd.h"
#include "step_kernel.cuh"

using namespace shardlight;

// uses: which of the states are there.
EXPORTED int cuda_sgd(const Step* step, int uses) {
    switch (uses) {
        case 0: return step_all<Sgd, 0>(*step);
        case kUseA: return step_all<Sgd, kUseA>(*step);
        default: return kNotForThese;
    }
}
