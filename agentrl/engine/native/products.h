// Products of a few rows with packed weights, and what is done to the result before it is stored.

#pragma once

#include <algorithm>

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK_ROWS = 96;  // rows that stay in the second-level cache while the weights pass by

enum Mode { NONE = 0, SWISH = 1, PLUS = 2, TIMES = 3 };

// sums += x[R][depth] times a panel of float32, [depth][WIDTH]
template <int R>
inline void add_products(Vec (&sums)[R][2], const float* x, const float* panel, int64_t depth) {
    for (int64_t k = 0; k < depth; ++k) {
        const Vec first = load(panel + k * WIDTH), second = load(panel + k * WIDTH + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const float value = x[r * depth + k];
            sums[r][0] += first * value;
            sums[r][1] += second * value;
        }
    }
}

#if defined(__AVX512BF16__)
// The same with a panel of bfloat16, [depth / 2][WIDTH][2]: two products a lane and instruction, summed in float32.
template <int R>
inline void add_products(Vec (&sums)[R][2], const bf16* x, const bf16* panel, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 2) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(panel + k * WIDTH);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(panel + k * WIDTH + 2 * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * depth + k, sizeof pair);
            const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][0], value, first);
            sums[r][1] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][1], value, second);
        }
    }
}
#endif

template <class E, class O, int R>
void product(O* out, const E* x, const E* panel, const E* bias, const E* other, int64_t count, int64_t depth,
             int64_t columns, int mode) {
    Vec sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Vec{};
    add_products<R>(sums, x, panel, depth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        O* to = out + r * columns;
        const E* beside = other + r * columns;
        float row[WIDTH];
        for (int half = 0; half < 2; ++half) {
            const int at = half * LANES;
            Vec value = sums[r][half];
            if (bias) value += load(bias + at);
            if (mode == SWISH) value = value / (1.0f + exponential(-value));
            if (count == WIDTH) {
                if (mode == PLUS) value += load(beside + at);
                if (mode == TIMES) value *= load(beside + at);
                store(to + at, value);
            } else {
                store(row + at, value);
            }
        }
        if (count < WIDTH)
            for (int64_t c = 0; c < count; ++c) {
                if (mode == PLUS) row[c] += get(beside + c);
                if (mode == TIMES) row[c] *= get(beside + c);
                put(to + c, row[c]);
            }
    }
}

template <class E, class O>
using Kernel = void (*)(O*, const E*, const E*, const E*, const E*, int64_t, int64_t, int64_t, int);

template <class E, class O, int... R>
struct Kernels {
    Kernel<E, O> of[sizeof...(R) + 1] = {nullptr, product<E, O, R>...};
};
#if defined(__AVX512F__)
template <class E, class O>
const Kernels<E, O, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12> KERNELS;
#else
template <class E, class O>
const Kernels<E, O, 1, 2, 3, 4, 5, 6> KERNELS;
#endif

// out[rows][columns] = x[rows][depth] times the packed weight, plus bias (padded to whole panels, or null), then by mode:
// as it is, swish, plus other, times other.
template <class E, class O>
void multiply(O* out, const E* x, const E* packed, const E* bias, const E* other, int64_t rows, int64_t columns,
              int64_t depth, int64_t mode) {
    const int64_t panels = (columns + WIDTH - 1) / WIDTH;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
        for (int64_t block = 0; block < rows; block += BLOCK_ROWS) {
            const int64_t last = std::min(rows, block + BLOCK_ROWS);
            for (int64_t p = begin; p < end; ++p) {
                const int64_t column = p * WIDTH, count = std::min<int64_t>(WIDTH, columns - column);
                for (int64_t row = block; row < last;) {
                    const int64_t left = last - row;
                    // an even share of the rows for each pass: 7 rows are 4 and 3, not 6 and 1
                    const int64_t passes = (left + ROWS - 1) / ROWS, take = (left + passes - 1) / passes;
                    KERNELS<E, O>.of[take](out + row * columns + column, x + row * depth, packed + p * depth * WIDTH,
                                           bias ? bias + column : nullptr,
                                           other ? other + row * columns + column : nullptr, count, depth, columns,
                                           static_cast<int>(mode));
                    row += take;
                }
            }
        }
    }
}

// A panel of packed from count <= WIDTH rows of a weight, which are also copied as they are, unless copy is null.
template <bool AROUND>
void pack_panel(uint32_t* to, uint32_t* copy, const uint32_t* from, int64_t count, int64_t words) {
    if (copy) {  // first: it brings the rows into the cache, one after the other
        int64_t i = 0;
        for (; i + LANES <= count * words; i += LANES) store<AROUND>(copy + i, load(from + i));
        for (; i < count * words; ++i) copy[i] = from[i];
    }
    int64_t k = 0;
    if (count == WIDTH) {
        for (; k + LANES <= words; k += LANES)
            for (int half = 0; half < WIDTH; half += LANES) {
                UVec rows[LANES];
#pragma GCC unroll 16
                for (int c = 0; c < LANES; ++c) rows[c] = load(from + (half + c) * words + k);
                transpose(rows);
#pragma GCC unroll 16
                for (int c = 0; c < LANES; ++c) store<AROUND>(to + (k + c) * WIDTH + half, rows[c]);
            }
    } else {
        std::memset(to, 0, words * WIDTH * sizeof *to);
    }
    for (; k < words; ++k)
        for (int64_t c = 0; c < count; ++c) to[k * WIDTH + c] = from[c * words + k];
}

// packed[panel][words][WIDTH] from weight[columns][words], where a word is a float32 or two bfloat16; missing columns are
// zero. The weight is also copied to copy, unless that is null.
void pack(uint32_t* packed, uint32_t* copy, const uint32_t* weight, int64_t columns, int64_t words) {
    const int64_t panels = (columns + WIDTH - 1) / WIDTH;
    const bool around = aligned(packed) && aligned(copy);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; ++p) {
            const int64_t first = p * WIDTH, count = std::min<int64_t>(WIDTH, columns - first);
            (around ? pack_panel<true> : pack_panel<false>)(packed + first * words, copy ? copy + first * words : nullptr,
                                                            weight + first * words, count, words);
        }
        settle();
    }
}

}  // namespace
