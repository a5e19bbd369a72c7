#include "../lion.h"
#include "step_kernel.cuh"

using namespace shardlight;

// uses: which of the states are there.
EXPORTED int cuda_lion(const Step* step, int uses) {
    switch (uses) {
        case kUseA: return step_all<Lion, kUseA>(*step);
        default: return kNotForThese;
    }
}
