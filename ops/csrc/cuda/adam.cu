#include "../adam.h"
#include "step_kernel.cuh"

using namespace shardlight;

// uses: which of the states are there.
EXPORTED int cuda_adam(const Step* step, int uses) {
    switch (uses) {
        case kUseA | kUseB: return step_all<Adam, kUseA | kUseB>(*step);
        case kUseA | kUseB | kUseC: return step_all<Adam, kUseA | kUseB | kUseC>(*step);
        default: return kNotForThese;
    }
}
