#include "../lion.h"
#include "step_loop.h"

using namespace shardlight;

// uses: which of the states are there.
extern "C" int ops_lion(const Step* step, int uses) {
    switch (uses) {
        case kUseA: return step_all<Lion, kUseA>(*step);
        default: return kNotForThese;
    }
}
