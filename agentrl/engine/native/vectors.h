// Vectors of float32 for any CPU that the compiler knows, and elements of float32 or bfloat16 that are read into them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // 24 sums, 2 weights and a broadcast in 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;  // 12 sums in 16 registers
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int WIDTH = 2 * LANES;  // columns of a panel

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t UVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t HVec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline Vec all(float value) { return Vec{} + value; }

#if defined(__clang__)
#define SHUFFLED(value, ...) __builtin_shufflevector(value, value, __VA_ARGS__)
#else
#define SHUFFLED(value, ...) __builtin_shuffle(value, IVec{__VA_ARGS__})
#endif

// By halves: one after the other would wait for each addition.
inline float sum(Vec value) {
#if defined(__AVX512F__)
    value += SHUFFLED(value, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    value += SHUFFLED(value, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    value += SHUFFLED(value, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif defined(__AVX2__)
    value += SHUFFLED(value, 4, 5, 6, 7, 0, 1, 2, 3);
    value += SHUFFLED(value, 2, 3, 0, 1, 6, 7, 4, 5);
#else
    value += SHUFFLED(value, 2, 3, 0, 1);
#endif
    return value[0] + value[1];
}

// Two vectors' first, or last, halves in turn: a0 b0 a1 b1 ...
#if defined(__clang__)
#define IN_TURN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define IN_TURN(a, b, ...) __builtin_shuffle(a, b, IVec{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
inline UVec first_halves(UVec a, UVec b) {
    return IN_TURN(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline UVec last_halves(UVec a, UVec b) {
    return IN_TURN(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(__AVX2__)
inline UVec first_halves(UVec a, UVec b) { return IN_TURN(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline UVec last_halves(UVec a, UVec b) { return IN_TURN(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline UVec first_halves(UVec a, UVec b) { return IN_TURN(a, b, 0, 4, 1, 5); }
inline UVec last_halves(UVec a, UVec b) { return IN_TURN(a, b, 2, 6, 3, 7); }
#endif

// Rows become columns. Taken in turn from both halves, log2(LANES) times, each element has come to its place.
inline void transpose(UVec (&rows)[LANES]) {
#pragma GCC unroll 4
    for (int done = 1; done < LANES; done *= 2) {
        UVec next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i) {
            next[2 * i] = first_halves(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = last_halves(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) rows[i] = next[i];
    }
}

inline UVec load(const uint32_t* from) { return *reinterpret_cast<const UVec*>(from); }

// Past the cache where AROUND (to an aligned place): nothing is read before it is overwritten.
template <bool AROUND>
inline void store(uint32_t* to, UVec value) {
#if defined(__AVX512F__)
    if (AROUND) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#elif defined(__AVX2__)
    if (AROUND) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#elif defined(__x86_64__)
    if (AROUND) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#endif
    *reinterpret_cast<UVec*>(to) = value;
}

inline bool aligned(const void* place) { return reinterpret_cast<uintptr_t>(place) % (LANES * 4) == 0; }

// Before another thread may read what was stored past the cache.
inline void settle() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
inline float get(const float* from) { return *from; }
inline void put(float* to, float value) { *to = value; }

inline Vec load(const bf16* from) {
    const UVec bits = __builtin_convertvector(*reinterpret_cast<const HVec*>(from), UVec) << 16;
    return reinterpret_cast<const Vec&>(bits);
}

// Rounds to nearest even; NaN stays NaN.
inline void store(bf16* to, Vec value) {
    const UVec bits = reinterpret_cast<const UVec&>(value);
    const UVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const UVec number = reinterpret_cast<const UVec&>(static_cast<const IVec&>(value == value));
    *reinterpret_cast<HVec*>(to) = __builtin_convertvector((rounded & number) | ((UVec{} + 0x7fc0u) & ~number), HVec);
}

inline float get(const bf16* from) {
    const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void put(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e^x to about two units in the last place; 0 below -87, NaN stays NaN, large values saturate.
inline Vec exponential(Vec x) {
    const IVec nothing = x < all(-87.0f);
    x = x > all(88.0f) ? all(88.0f) : x;
    x = x < all(-87.0f) ? all(-87.0f) : x;
    const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec n = (x * 1.44269504088896341f + magic) - magic;
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    IVec exponent = (__builtin_convertvector(n, IVec) + 127) << 23;
    p *= reinterpret_cast<Vec&>(exponent);
    return nothing ? Vec{} : p;
}

}  // namespace
