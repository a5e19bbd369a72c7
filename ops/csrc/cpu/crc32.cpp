// CRC-32 of memory, the value of zlib's: by carry-less multiplication where the processor has it, else by tables.
//
// The bytes are a polynomial over GF(2), the first bit the highest power. What lies T bits ahead of other bytes may be
// added to these after a multiplication by x^T modulo the CRC's polynomial, so many bytes are folded onto the next ones
// at once, and only the last 16 go through the tables.
// Source: Gopal et al. 2009, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel); tables:
// Kounavis and Berry 2005, A Systematic Approach to Building High Performance Software-Based CRC Generators.

#include <array>
#include <cstring>

#include "../numbers.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // reflected: the lowest bit is the highest power
constexpr size_t kSlices = 16;

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][b]: what byte b adds to the CRC when k more bytes follow it.
constexpr Tables tables_of() {
    Tables made{};
    for (uint32_t b = 0; b < 256; ++b) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
        made[0][b] = crc;
    }
    for (size_t k = 1; k < kSlices; ++k)
        for (size_t b = 0; b < 256; ++b) made[k][b] = made[k - 1][b] >> 8 ^ made[0][made[k - 1][b] & 255];
    return made;
}
constexpr Tables kTables = tables_of();

// `crc` is the register, which starts as ones and is inverted in the end.
uint32_t by_table(uint32_t crc, const unsigned char* at, size_t n) {
    for (; n >= kSlices; at += kSlices, n -= kSlices) {
        uint32_t next = 0;
        for (size_t k = 0; k < 4; ++k) next ^= kTables[15 - k][at[k] ^ (crc >> 8 * k & 255)];
        for (size_t k = 4; k < kSlices; ++k) next ^= kTables[15 - k][at[k]];
        crc = next;
    }
    for (; n; ++at, --n) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 255];
    return crc;
}

#if defined(__x86_64__)

// x^n modulo the polynomial, reflected in 33 bits: the product of two reflected numbers is one bit short.
constexpr int64_t power(int n) {
    uint32_t found = 0x80000000;
    for (; n; --n) found = found & 1 ? found >> 1 ^ kPolynomial : found >> 1;
    return int64_t(uint64_t(found) << 1);
}

// The factors that move 16 bytes `bits` ahead; the first 8 of them are 64 powers higher than the others.
constexpr int64_t first_factor(int bits) { return power(bits + 32); }
constexpr int64_t second_factor(int bits) { return power(bits - 32); }

#define FOR_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define FOR_VPCLMUL __attribute__((target("vpclmulqdq,avx512f,pclmul,sse4.1")))

template <int Bits> FOR_PCLMUL inline __m128i moved(__m128i x, __m128i onto) {
    const __m128i by = _mm_set_epi64x(second_factor(Bits), first_factor(Bits));
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), onto);
}
FOR_PCLMUL inline __m128i load16(const unsigned char* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// What is left of 16 folded bytes and of fewer than 64 that follow.
FOR_PCLMUL inline uint32_t finished(__m128i x, const unsigned char* at, size_t n) {
    for (; n >= 16; at += 16, n -= 16) x = moved<128>(x, load16(at));
    unsigned char folded[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(folded), x);
    return by_table(by_table(0, folded, 16), at, n);
}

FOR_PCLMUL uint32_t by_pclmul(uint32_t crc, const unsigned char* at, size_t n) {
    if (n < 64) return by_table(crc, at, n);
    __m128i x[4];
    for (int k = 0; k < 4; ++k) x[k] = load16(at + 16 * k);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int(crc)));
    for (at += 64, n -= 64; n >= 64; at += 64, n -= 64)
        for (int k = 0; k < 4; ++k) x[k] = moved<512>(x[k], load16(at + 16 * k));
    for (int k = 1; k < 4; ++k) x[k] = moved<128>(x[k - 1], x[k]);
    return finished(x[3], at, n);
}

template <int Bits> FOR_VPCLMUL inline __m512i moved64(__m512i x, __m512i onto) {
    constexpr int64_t first = first_factor(Bits), second = second_factor(Bits);
    const __m512i by = _mm512_set_epi64(second, first, second, first, second, first, second, first);
    const __m512i low = _mm512_clmulepi64_epi128(x, by, 0x00), high = _mm512_clmulepi64_epi128(x, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96);  // the sum of the three
}

FOR_VPCLMUL uint32_t by_vpclmul(uint32_t crc, const unsigned char* at, size_t n) {
    if (n < 256) return by_pclmul(crc, at, n);
    __m512i x[4];
    for (int k = 0; k < 4; ++k) x[k] = _mm512_loadu_si512(at + 64 * k);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
    for (at += 256, n -= 256; n >= 256; at += 256, n -= 256)
        for (int k = 0; k < 4; ++k) x[k] = moved64<2048>(x[k], _mm512_loadu_si512(at + 64 * k));
    for (int k = 1; k < 4; ++k) x[k] = moved64<512>(x[k - 1], x[k]);
    for (; n >= 64; at += 64, n -= 64) x[3] = moved64<512>(x[3], _mm512_loadu_si512(at));
    unsigned char folded[64];
    _mm512_storeu_si512(folded, x[3]);
    __m128i last = load16(folded);
    for (int k = 1; k < 4; ++k) last = moved<128>(last, load16(folded + 16 * k));
    return finished(last, at, n);
}

#endif

using Way = uint32_t (*)(uint32_t, const unsigned char*, size_t);

// By speed; a processor that has one has those before it.
Way way_of(int number) {
#if defined(__x86_64__)
    if (number == 2) return by_vpclmul;
    if (number == 1) return by_pclmul;
#endif
    return number == 0 ? by_table : nullptr;
}

}  // namespace

// The number of the fastest way on this processor; all from 0 on up to it can be asked for.
extern "C" int ops_crc32_ways() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") ? 2 : 1;
#else
    return 0;
#endif
}

// Writes the CRC-32 of each chunk of memory, the last one maybe shorter; each goes on from `start`, that of what is
// before it (0: nothing). Returns 0, or -1 where this processor has no such way.
extern "C" int ops_crc32(const void* memory, int64_t n, int64_t chunk, uint32_t start, uint32_t* out, int way, int threads) {
    if (way < 0 || way > ops_crc32_ways() || chunk < 1) return -1;
    const Way crc_of = way_of(way);
    const auto* at = static_cast<const unsigned char*>(memory);
    shardlight::in_parallel((n + chunk - 1) / chunk, threads, 1, [=](int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c)
            out[c] = ~crc_of(~start, at + c * chunk, size_t(n - c * chunk < chunk ? n - c * chunk : chunk));
    });
    return 0;
}
