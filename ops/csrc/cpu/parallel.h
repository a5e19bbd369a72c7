// Work that is split among threads of its own: no OpenMP, whose runtime PyTorch brings in a version of its own.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace shardlight {

// Calls work(first, last) for parts of [0, n), which are multiples of `grain` but for the last, from `threads` threads.
// A thread takes the next part when it is done with one, so that none waits for another that gets no core.
template <class Work> void in_parallel(int64_t n, int threads, int64_t grain, const Work& work) {
    constexpr int64_t kParts = 16;  // per thread
    const int64_t pieces = (n + grain - 1) / grain;
    const int64_t workers = threads < pieces ? threads : pieces;
    if (workers < 2) {
        if (n) work(int64_t(0), n);
        return;
    }
    const int64_t part = (pieces + workers * kParts - 1) / (workers * kParts) * grain;
    std::atomic<int64_t> next{0};
    auto take = [&] {
        for (int64_t first; (first = next.fetch_add(part, std::memory_order_relaxed)) < n;)
            work(first, n - first < part ? n : first + part);
    };
    std::vector<std::thread> others;
    try {
        others.reserve(size_t(workers - 1));
        while (int64_t(others.size()) < workers - 1) others.emplace_back(take);
    } catch (const std::system_error&) {
        // No more threads are to be had: those that there are do the rest.
    }
    take();
    for (auto& thread : others) thread.join();
}

}  // namespace shardlight
