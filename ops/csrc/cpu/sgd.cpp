#include "../sgd.h"
#include "step_loop.h"

using namespace shardlight;

// uses: which of the states are there.
extern "C" int ops_sgd(const Step* step, int uses) {
    switch (uses) {
        case 0: return step_all<Sgd, 0>(*step);
        case kUseA: return step_all<Sgd, kUseA>(*step);
        default: return kNotForThese;
    }
}
