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
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    uint64_t given[2];  // to a shuffle: the ones with even and odd numbers, since some may be at the next already
    unsigned shuffles;
    bool ended;
};

inline Index thread, block;
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline const std::function<void()>* body;

inline void run() {
    (*body)();
    fibers[thread.x].ended = true;
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
        for (auto& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = &scheduler;
            fiber.shuffles = 0, fiber.ended = false;
            makecontext(&fiber.context, emulation::run, 0);
        }
        for (bool more = true; more;) {
            more = false;
            for (thread.x = 0; thread.x < fibers.size(); ++thread.x) {
                auto& fiber = fibers[thread.x];
                if (fiber.ended) continue;
                swapcontext(&scheduler, &fiber.context);
                more = more || !fiber.ended;
            }
        }
    }
    return 0;
}

template <class T> T __shfl_down_sync(unsigned, T value, int down, int width = 32) {
    using namespace emulation;
    const unsigned me = thread.x, from = int(me % unsigned(width)) + down < width ? me + unsigned(down) : me;
    auto& fiber = fibers[me];
    const unsigned which = fiber.shuffles++ % 2;
    std::memcpy(&fiber.given[which], &value, sizeof value);
    swapcontext(&fiber.context, &scheduler);
    std::memcpy(&value, &fibers[from].given[which], sizeof value);
    return value;
}

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long more) {
    const auto before = *at;
    *at += more;
    return before;
}
