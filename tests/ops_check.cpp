// Runs every step, every sum and every way to a CRC-32 of csrc/cpu over sizes, dtypes and thread counts, each buffer exactly as large as it has
// to be, and prints a hash of all that they write; for sanitizers, and to compare processors.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../ops/csrc/step.h"

using namespace shardlight;

extern "C" {
int ops_adam(const Step*, int);
int ops_sgd(const Step*, int);
int ops_adagrad(const Step*, int);
int ops_rmsprop(const Step*, int);
int ops_lion(const Step*, int);
int64_t ops_square_sums(const void*, int, int64_t, int64_t, double, double, double*, int);
int64_t ops_scale(void*, int, int64_t, double, int);
int ops_cast(const void*, int, void*, int, int64_t, int);
int ops_sum(const void* const*, int, int, void*, int, int64_t, int, int);
int ops_crc32_ways();
int ops_crc32(const void*, int64_t, int64_t, uint32_t, uint32_t*, int, int);
void ops_traffic(float*, const void*, float*, float*, uint16_t*, int64_t, int);
}

namespace {

uint64_t hash = 1469598103934665603u;
void note(const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(from)[i]) * 1099511628211u;
}

uint32_t state = 1;
float next() {
    state = state * 1664525u + 1013904223u;
    return float(int32_t(state >> 8) - (1 << 23)) / float(1 << 23);
}

// n numbers, one element behind where memory begins: nothing is aligned.
struct Numbers {
    Numbers(int dtype, int64_t n, bool positive = false) : bytes(size_t(n) * width(dtype)), memory(bytes + width(dtype)) {
        at = memory.data() + width(dtype);
        for (int64_t i = 0; i < n; ++i) {
            const float drawn = next(), value = positive ? drawn * drawn : drawn;
            if (dtype == F32) reinterpret_cast<float*>(at)[i] = value;
            if (dtype == F64) reinterpret_cast<double*>(at)[i] = double(value);
            if (dtype == BF16) reinterpret_cast<BFloat16*>(at)[i] = BFloat16::narrow(value);
            if (dtype == F16) reinterpret_cast<Float16*>(at)[i] = Float16::narrow(value);
        }
    }
    void noted() const { note(at, bytes); }
    size_t bytes;
    std::vector<unsigned char> memory;
    unsigned char* at;
};

void check(bool right, const char* what) {
    if (!right) std::printf("%s\n", what), std::exit(1);
}

const int64_t kSizes[] = {0, 1, 7, 63, 64, 65, 1023, 1025, 70001};

void steps(int threads) {
    struct { int (*function)(const Step*, int); std::vector<int> uses; std::vector<double> options; } ops[] = {
        {ops_adam, {3, 7}, {1e-2, 0.9, 0.99, 1e-8, 0.1, 1}},      {ops_adam, {3}, {1e-2, 0.3, 0.99, 1e-8, 0.1, 0}},
        {ops_sgd, {0, 1}, {1e-2, 0.9, 0.1, 0.1, 1}},              {ops_adagrad, {1}, {1e-2, 0.1, 0.1, 1e-8}},
        {ops_rmsprop, {1, 3, 5, 7}, {1e-2, 0.9, 1e-1, 0.1, 0.9}}, {ops_lion, {1}, {1e-2, 0.9, 0.99, 0.1}},
    };
    const int mixes[][4] = {  // parameter, gradient, states, copy; -1: none
        {F32, F32, F32, -1}, {F32, F32, F32, BF16}, {F32, BF16, F32, BF16}, {F32, F32, BF16, -1}, {F32, F32, BF16, BF16},
        {BF16, BF16, BF16, -1}, {F32, F16, F32, F16}, {F64, F64, F64, -1}, {F16, F16, F16, F32}, {F64, F32, F64, F32},
    };
    constexpr int64_t count = sizeof(kSizes) / sizeof(kSizes[0]);
    for (const auto& op : ops)
        for (int uses : op.uses)
            for (const auto& mix : mixes) {
                std::vector<Numbers> kept;
                std::vector<void*> pointers[6];
                for (int64_t i = 0; i < count; ++i)
                    for (int k = 0; k < 6; ++k) {
                        const int dtype = mix[k < 2 ? k : k < 5 ? 2 : 3];
                        kept.emplace_back(dtype < 0 ? F32 : dtype, dtype < 0 ? 0 : kSizes[i], k >= 2);
                        pointers[k].push_back(kept.back().at);
                    }
                std::vector<double> numbers(count, 1.0);
                numbers[1] = 3.0;
                Step step = {};
                step.count = count, step.numel = kSizes, step.parameter = pointers[0].data();
                step.gradient = pointers[1].data();
                for (int k = 0; k < kStates; ++k) step.state[k] = uses >> k & 1 ? pointers[2 + k].data() : nullptr;
                step.copy = mix[3] < 0 ? nullptr : pointers[5].data();
                step.number = numbers.data(), step.options = op.options.data();
                step.scale = 0.5, step.clip = 0.7, step.threads = threads;
                step.parameter_dtype = mix[0], step.gradient_dtype = mix[1], step.state_dtype = mix[2];
                step.copy_dtype = mix[3] < 0 ? mix[0] : mix[3];
                check(op.function(&step, uses) == 0, "no version");
                for (const auto& numbers_of : kept) numbers_of.noted();
            }
}

void sums(int threads) {
    for (int dtype : {F32, F64, BF16, F16})
        for (int64_t n : kSizes) {
            Numbers a(dtype, n), b(dtype, n), c(dtype, n);
            std::vector<double> found(size_t(n + 1023) / 1024);
            check(ops_square_sums(a.at, dtype, n, 1024, 0.5, 0.7, found.data(), threads) == 0, "not finite");
            note(found.data(), found.size() * sizeof(double));
            check(ops_scale(a.at, dtype, n, 0.3, threads) == 0, "not finite");
            const void* parts[] = {a.at, b.at, c.at};
            check(ops_sum(parts, 3, dtype, c.at, dtype, n, 0, threads) == 0, "no sum");
            for (int to : {F32, F64, BF16, F16}) {
                Numbers out(to, n);
                check(ops_cast(b.at, dtype, out.at, to, n, threads) == 0, "no cast");
                out.noted();
            }
            a.noted(), c.noted();
        }
    for (int64_t n : kSizes) {
        Numbers p(F32, n), g(F32, n), a(F32, n), b(F32, n), g16(BF16, n), copy(BF16, n);
        auto as_f32 = [](Numbers& x) { return reinterpret_cast<float*>(x.at); };
        ops_traffic(as_f32(p), g.at, as_f32(a), as_f32(b), nullptr, n, threads);
        ops_traffic(as_f32(p), g16.at, as_f32(a), as_f32(b), reinterpret_cast<uint16_t*>(copy.at), n, threads);
        p.noted(), a.noted(), b.noted(), copy.noted();
    }
}

// Bit by bit, as the CRC is defined.
uint32_t crc_of(const unsigned char* at, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; ++i)
        for (int bit = 0; bit < 8; ++bit) crc = (crc ^ at[i] >> bit) & 1 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
    return ~crc;
}

void crcs(int threads) {
    for (int64_t n = 0; n < 1200; n += n < 400 ? 1 : 37) {
        Numbers bytes(BF16, n / 2 + 1);
        for (int64_t chunk : {n + 1, int64_t(300), int64_t(64)}) {
            std::vector<uint32_t> found(size_t((n + chunk - 1) / chunk));
            for (int way = 0; way <= ops_crc32_ways(); ++way) {
                check(ops_crc32(bytes.at, n, chunk, 0, found.data(), way, threads) == 0, "no way");
                for (size_t c = 0; c < found.size(); ++c) {
                    const int64_t first = int64_t(c) * chunk, length = n - first < chunk ? n - first : chunk;
                    check(found[c] == crc_of(bytes.at + first, size_t(length)), "not the CRC-32");
                }
            }
            note(found.data(), found.size() * 4);
        }
    }
}

}  // namespace

int main() {
    uint64_t first = 0;
    for (int threads : {1, 2, 3}) {
        hash = 1469598103934665603u, state = 1;
        steps(threads), sums(threads), crcs(threads);
        first = threads == 1 ? hash : first;
        check(hash == first, "threads change bits");
    }
    std::printf("%016llx\n", static_cast<unsigned long long>(hash));
}
