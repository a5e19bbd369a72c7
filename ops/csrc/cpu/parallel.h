// Work that is split among threads of its own: no OpenMP, whose runtime PyTorch brings in a version of its own.

#pragma once

#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace shardlight {

// Calls work(first, last) for parts of [0, n), which are multiples of `grain` but for the last, from `threads` threads.
template <class Work> void in_parallel(int64_t n, int threads, int64_t grain, const Work& work) {
    int64_t pieces = (n + grain - 1) / grain;
    int64_t workers = threads < pieces ? threads : pieces;
    if (workers < 2) {
        if (n) work(int64_t(0), n);
        return;
    }
    auto from = [=](int64_t worker) { return worker == workers ? n : pieces * worker / workers * grain; };
    std::vector<std::thread> others;
    int64_t given = 1;
    try {
        others.reserve(size_t(workers));
        for (; given < workers; ++given) others.emplace_back(work, from(given), from(given + 1));
    } catch (const std::system_error&) {
        // No more threads are to be had: this one does the rest.
        work(from(given), n);
    }
    work(int64_t(0), from(1));
    for (auto& thread : others) thread.join();
}

}  // namespace shardlight
