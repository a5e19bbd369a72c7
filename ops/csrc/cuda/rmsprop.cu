#include "../rmsprop.h"
#include "step_kernel.cuh"

using namespace shardlight;

// uses: which of the states are there.
EXPORTED int cuda_rmsprop(const Step* step, int uses) {
    switch (uses) {
        case kUseA: return step_all<RmsProp, kUseA>(*step);
        case kUseA | kUseB: return step_all<RmsProp, kUseA | kUseB>(*step);
        case kUseA | kUseC: return step_all<RmsProp, kUseA | kUseC>(*step);
        case kUseA | kUseB | kUseC: return step_all<RmsProp, kUseA | kUseB | kUseC>(*step);
        default: return kNotForThese;
    }
}
