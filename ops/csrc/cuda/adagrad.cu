#include "../adagrad.h"
#include "step_kernel.cuh"

using namespace shardlight;

// uses: which of the states are there.
EXPORTED int cuda_adagrad(const Step* step, int uses) {
    switch (uses) {
        case kUseA: return step_all<Adagrad, kUseA>(*step);
        default: return kNotForThese;
    }
}
