// Random reads and writes of a disk engine, compared with memory, by several threads at once, with short and failed I/O;
// for sanitizers. Arguments: a file to use, 1 for io_uring or 0 for threads, how many rounds.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

struct Fault {
    int32_t error, what;
    int64_t file;
    uint64_t offset, bytes, size;
};

extern "C" {
int ops_disk_ring_refused();
void* ops_disk_new(int, int, uint64_t, int*);
void ops_disk_stop(void*);
void ops_disk_free(void*);
int64_t ops_disk_add_file(void*, int, int);
void ops_disk_close_file(void*, int64_t);
int ops_disk_start(void*, uint64_t, int64_t, int, void*, uint64_t, uint64_t);
int ops_disk_wait(void*, uint64_t, int64_t, Fault*);
int ops_disk_finished(void*, uint64_t);
int ops_disk_release(void*, uint64_t);
int ops_disk_settle(void*, int64_t, int64_t, Fault*);
void ops_disk_counters(void*, uint64_t*);
void ops_disk_freeze(void*);
void ops_disk_thaw(void*);
void ops_disk_spoil(void*, int64_t, int64_t, int);
}

namespace {

constexpr uint64_t kBlock = 4096, kBytes = 24 * kBlock;

void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

struct Drawn {
    uint64_t state;
    uint64_t operator()(uint64_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) % below;
    }
};

struct Read {
    uint64_t number;
    char *memory, *at;
    std::vector<char> want;
};

// One thread's file, of which it knows what is in it.
void use(void* engine, int64_t file, uint64_t first, int rounds) {
    Drawn drawn{first};
    std::vector<char> model(kBytes, 0);
    std::vector<Read> reads;
    std::vector<std::pair<uint64_t, char*>> writes;
    uint64_t number = first;
    Fault fault{};
    for (int n = 0; n < rounds; ++n) {
        const uint64_t unit = drawn(2) ? kBlock : 1;
        const uint64_t offset = drawn(kBytes / unit) * unit, most = kBytes - offset;
        uint64_t bytes = (1 + drawn(unit == 1 ? 9000 : 4)) * unit;
        bytes = bytes < most ? bytes : most;
        const uint64_t behind = drawn(2) ? offset % kBlock : drawn(64);
        auto* memory = static_cast<char*>(std::aligned_alloc(kBlock, (behind + bytes + kBlock) / kBlock * kBlock));
        const bool write = drawn(2);
        if (write) {
            for (uint64_t k = 0; k < bytes; ++k) memory[behind + k] = char(n + k);
            std::memcpy(model.data() + offset, memory + behind, bytes);
        }
        check(!ops_disk_start(engine, ++number, file, write, memory + behind, offset, bytes), "not started");
        if (write)
            writes.emplace_back(number, memory);
        else
            reads.push_back({number, memory, memory + behind, {model.begin() + int64_t(offset), model.begin() + int64_t(offset + bytes)}});
        if (drawn(16) == 0) {
            ops_disk_freeze(engine);
            ops_disk_thaw(engine);
        }
        if (drawn(8) == 0 || n + 1 == rounds) {
            for (Read& read : reads) {
                while (ops_disk_wait(engine, read.number, 1000, &fault)) {
                }
                check(!fault.error && ops_disk_release(engine, read.number), "a read failed");
                check(!std::memcmp(read.at, read.want.data(), read.want.size()), "a read differs");
                std::free(read.memory);
            }
            reads.clear();
            for (const auto& [which, at] : writes) ops_disk_release(engine, which);
            while (ops_disk_settle(engine, file, 1000, &fault)) {
            }
            check(!fault.error, "a write failed");
            for (const auto& [which, at] : writes) std::free(at);
            writes.clear();
        }
    }
}

// Failures end requests, and nothing else.
void fail(void* engine, int64_t file) {
    auto* memory = static_cast<char*>(std::aligned_alloc(kBlock, kBytes));
    std::memset(memory, 1, kBytes);
    Fault fault{};
    for (uint64_t n = 0; n < 60; ++n) {
        ops_disk_spoil(engine, INT64_MAX, int64_t(n % 7), 5);
        for (uint64_t k = 0; k < 3; ++k)
            check(!ops_disk_start(engine, 1 + 3 * n + k, file, k != 1, memory + k, k, kBytes - k), "not started");
        if (n % 2) {
            for (uint64_t k = 0; k < 3; ++k)
                while (ops_disk_wait(engine, 1 + 3 * n + k, 1000, &fault)) {
                }
            ops_disk_release(engine, 1 + 3 * n);
        } else {
            while (ops_disk_settle(engine, 0, 1000, &fault)) {
            }
            check(fault.error == 5, "a failure is not told");
        }
    }
    std::free(memory);
}

}  // namespace

int main(int, char** arguments) {
    const int ring = std::atoi(arguments[2]), rounds = std::atoi(arguments[3]);
    check(!ring || !ops_disk_ring_refused(), "refused");
    for (int depth : {1, 3, 8}) {
        int error = 0;
        void* engine = ops_disk_new(ring, depth, 2 * kBlock, &error);
        check(engine, "no engine");
        std::vector<std::thread> threads;
        for (uint64_t n = 0; n < 3; ++n) {
            const int fd = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC | (n ? O_DIRECT : 0), 0600);
            check(fd >= 0 && !unlink(arguments[1]) && !ftruncate(fd, kBytes), "no file");
            const int64_t file = ops_disk_add_file(engine, fd, n != 0);
            threads.emplace_back([=] { use(engine, file, n << 32, rounds); });
        }
        for (auto& each : threads) each.join();
        const int fd = open(arguments[1], O_RDWR | O_CREAT | O_DIRECT, 0600);
        check(fd >= 0 && !unlink(arguments[1]) && !ftruncate(fd, kBytes), "no file");
        const int64_t file = ops_disk_add_file(engine, fd, 1);
        ops_disk_spoil(engine, 5000, -1, 0);  // which is no whole number of blocks
        use(engine, file, uint64_t(9) << 32, rounds / 4);
        ops_disk_close_file(engine, file);
        const int last = open(arguments[1], O_RDWR | O_CREAT, 0600);
        check(last >= 0 && !unlink(arguments[1]) && !ftruncate(last, kBytes), "no file");
        fail(engine, ops_disk_add_file(engine, last, 1));
        uint64_t bytes[2];
        ops_disk_counters(engine, bytes);
        check(bytes[0] && bytes[1], "nothing was counted");
        // What is under way ends with the engine.
        auto* memory = static_cast<char*>(std::aligned_alloc(kBlock, kBytes));
        std::memset(memory, 2, kBytes);
        ops_disk_spoil(engine, INT64_MAX, -1, 0);
        check(!ops_disk_start(engine, 1 << 20, 5, 1, memory, 0, kBytes), "not started");
        ops_disk_stop(engine);
        ops_disk_free(engine);
        std::free(memory);
    }
    std::puts("done");
}
