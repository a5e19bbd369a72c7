// Random collectives among ranks that are threads here, for sanitizers: see test_host_collectives_sanitized.py.

#include "../ops/csrc/cpu/host_collectives.cpp"

#include <cstdio>
#include <random>

namespace {

constexpr uint64_t kArenaBytes = 8 << 20;
constexpr uint64_t kRingBytes = 1 << 16;  // small, so that rings are full most of the time

uint32_t value(uint64_t collective, int from, int to, uint64_t i) {
    return uint32_t(collective * 31 + uint64_t(from) * 7 + uint64_t(to) * 3 + i) % 1000;
}

[[noreturn]] void fail(const char* what, uint64_t collective, int rank) {
    std::fprintf(stderr, "%s: collective %llu on rank %d\n", what, static_cast<unsigned long long>(collective), rank);
    std::_Exit(1);
}

struct UnderWay {
    int64_t number;
    uint64_t collective, n;
    int kind;
    std::vector<uint32_t> give, take;
};

void check(const UnderWay& one, int rank, int world) {
    for (int from = 0; from < world; ++from)
        for (uint64_t i = 0; i < one.n; ++i) {
            uint32_t want = 0, found = 0;
            if (one.kind == 0) want = value(one.collective, from, 0, i), found = one.take[from * one.n + i];
            if (one.kind == 1) {
                for (int r = 0; r < world; ++r) want += value(one.collective, r, rank, i);
                found = one.take[i];
            }
            if (one.kind == 2) want = value(one.collective, from, rank, i), found = one.take[from * one.n + i];
            if (one.kind == 3) want = value(one.collective, 0, 0, i), found = one.take[i];
            if (want != found) fail("wrong", one.collective, rank);
        }
}

void run(int file, const int* arenas, int rank, int world, int count) {
    void* handle = host_attach(file, rank, world, kRingBytes, 0);
    if (!handle) fail("not attached", 0, rank);
    // Every other collective gives what lies in the arena, and some of that is large enough to be read there.
    void* own_arena = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, arenas[rank], 0);
    for (int r = 0; r < world; ++r) {
        void* base = r == rank ? own_arena : nullptr;
        if (own_arena == MAP_FAILED || host_arena(handle, r, arenas[r], base, kArenaBytes, 2000)) fail("no arena", 0, rank);
    }
    std::mt19937 alike(1), own(rank + 2);
    std::deque<UnderWay> open;
    for (int c = 0; c < count; ++c) {
        UnderWay& one = open.emplace_back();
        one.collective = uint64_t(c), one.kind = int(alike() % 4), one.n = alike() % 3 ? alike() % 50 : alike() % 30000;
        one.give.resize(one.n * world + 1);
        one.take.resize(one.n * world + 1);
        uint32_t* give = one.give.data();
        uint64_t bytes = one.n * 4;
        for (int to = 0; to < world; ++to)
            for (uint64_t i = 0; i < one.n; ++i)
                one.give[to * one.n + i] = value(one.collective, rank, one.kind == 0 || one.kind == 3 ? 0 : to, i);
        if (own() % 2) {
            // At most five are open at a time.
            give = reinterpret_cast<uint32_t*>(static_cast<char*>(own_arena) + c % 8 * (kArenaBytes / 8));
            std::memcpy(give, one.give.data(), one.give.size() * 4);
        }
        if (one.kind == 0) one.number = host_all_gather(handle, 0, give, bytes, one.take.data());
        if (one.kind == 1) one.number = host_sum(handle, 1, give, one.n, I32, one.take.data(), I32, 0);
        if (one.kind == 2) {
            std::vector<const void*> out;
            std::vector<void*> in;
            std::vector<uint64_t> sizes(world, bytes);
            for (int r = 0; r < world; ++r) out.push_back(give + r * one.n), in.push_back(&one.take[r * one.n]);
            one.number = host_all_to_all(handle, 2, out.data(), sizes.data(), in.data(), sizes.data());
        }
        if (one.kind == 3) {
            if (rank == 0) one.take = one.give;
            one.number = host_broadcast(handle, 3, one.take.data(), bytes, 0);
        }
        if (own() % 20 == 0) usleep(own() % 500);
        while (open.size() > own() % 4) {
            int found = 1;
            for (int slices = 0; found == 1 && slices < 6000; ++slices) found = host_wait(handle, open.front().number, 10000);
            if (found) fail("did not end", open.front().collective, rank);
            check(open.front(), rank, world);
            open.pop_front();
        }
    }
    while (!open.empty()) {
        while (host_wait(handle, open.front().number, 10000) == 1) {}
        check(open.front(), rank, world);
        open.pop_front();
    }
    host_detach(handle);
    munmap(own_arena, kArenaBytes);
}

}  // namespace

int main(int, char** arguments) {
    int world = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
    int file = memfd_create("check", 0);
    if (host_prepare(file, world, kRingBytes)) fail("not prepared", 0, 0);
    std::vector<int> arenas;
    for (int r = 0; r < world; ++r) {
        arenas.push_back(memfd_create("arena", 0));
        if (ftruncate(arenas[r], kArenaBytes)) fail("no memory", 0, r);
    }
    std::vector<std::thread> ranks;
    for (int r = 0; r < world; ++r) ranks.emplace_back(run, file, arenas.data(), r, world, count);
    for (std::thread& rank : ranks) rank.join();
    std::puts("done");
}
