// Runs the CUDA sources on a CPU, for tests where there is no GPU: one block after the other, its threads as fibers that
// come together at each shuffle. Put on the include path before CUDA's own header of this name.

#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)

using cudaStream_t = void*;
using cudaError_t = int;
inline const char* cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorEmulated" : "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t error) { return error ? "emulated" : "no error"; }

namespace emulation {

struct Index { unsigned x; };
// Runs the threads from the next one on, each to its end, up to one that waits in a shuffle.
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    unsigned thread;
    bool ended;
};
struct Lane {
    uint64_t given[2];  // to a shuffle: the ones with even and odd numbers, since some may be at the next already
    unsigned shuffles;
};

inline Index thread, block;
inline unsigned next;
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline Fiber* running;
inline std::vector<Lane> lanes;
inline const std::function<void()>* body;

inline void run() {
    Fiber& self = *running;
    while (next < lanes.size()) {
        self.thread = thread.x = next++;
        (*body)();
    }
    self.ended = true;
}

inline void resume(Fiber& fiber) {
    running = &fiber;
    thread.x = fiber.thread;
    swapcontext(&scheduler, &fiber.context);
}

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block

template <class Kernel> int emulate(int64_t blocks, int threads, const Kernel& kernel) {
    using namespace emulation;
    if (blocks < 1 || blocks > 0x7FFFFFFF) return 1;
    const std::function<void()> called = kernel;
    body = &called;
    fibers.resize(size_t(threads));
    for (block.x = 0; block.x < uint64_t(blocks); ++block.x) {
        lanes.assign(size_t(threads), Lane{});
        size_t used = 0;
        for (next = 0; next < lanes.size();) {
            auto& fiber = fibers[used++];
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            fiber.thread = 0, fiber.ended = false;
            makecontext(&fiber.context, emulation::run, 0);
            resume(fiber);
        }
        for (bool more = true; more;) {
            more = false;
            for (size_t i = 0; i < used; ++i) {
                if (fibers[i].ended) continue;
                resume(fibers[i]);
                more = more || !fibers[i].ended;
            }
        }
    }
    return 0;
}

template <class T> T __shfl_down_sync(unsigned, T value, int down, int width = 32) {
    using namespace emulation;
    const unsigned me = thread.x, from = int(me % unsigned(width)) + down < width ? me + unsigned(down) : me;
    const unsigned which = lanes[me].shuffles++ % 2;
    std::memcpy(&lanes[me].given[which], &value, sizeof value);
    swapcontext(&running->context, &scheduler);
    std::memcpy(&value, &lanes[from].given[which], sizeof value);
    return value;
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long more) {
    const auto before = *at;
    *at += more;
    return before;
}
