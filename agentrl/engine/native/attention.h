// Norms, rotation and attention of a decode step.

#pragma once

#include <algorithm>
#include <vector>

#include <omp.h>

#include "vectors.h"

namespace {

template <class E>
void normalise(E* out, const E* x, const E* weight, int64_t width, float epsilon) {
    Vec total{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total += load(x + i) * load(x + i);
    float squares = sum(total);
    for (; i < width; ++i) squares += get(x + i) * get(x + i);
    const float scale = 1.0f / std::sqrt(squares / width + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(weight + i) * (load(x + i) * scale));
    for (; i < width; ++i) put(out + i, get(weight + i) * (get(x + i) * scale));
}

// Queries and keys of mixed[tokens][heads + 2 * kv_heads][dim], in place: their own norms where there are some, then rotation by
// cosine and sine[tokens][dim / 2].
template <class E>
void rotate(E* mixed, const E* cosine, const E* sine, const E* query_norm, const E* key_norm, int64_t tokens, int64_t heads,
            int64_t kv_heads, int64_t dim, float epsilon) {
    const int64_t half = dim / 2, stride = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens > 4)
    for (int64_t token = 0; token < tokens; ++token) {
        const E *c = cosine + token * half, *s = sine + token * half;
        for (int64_t head = 0; head < heads + kv_heads; ++head) {
            E* x = mixed + token * stride + head * dim;
            const E* norm = head < heads ? query_norm : key_norm;
            if (norm) normalise(x, x, norm, dim, epsilon);
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                const Vec first = load(x + i), second = load(x + i + half), cos = load(c + i), sin = load(s + i);
                store(x + i, first * cos - second * sin);
                store(x + i + half, second * cos + first * sin);
            }
            for (; i < half; ++i) {
                const float first = get(x + i), second = get(x + i + half), cos = get(c + i), sin = get(s + i);
                put(x + i, first * cos - second * sin);
                put(x + i + half, second * cos + first * sin);
            }
        }
    }
}

// out[B][dim] = sums of values[length][dim] weighed by weights[B][stride], each over its total; dim is PARTS vectors.
template <class E, int PARTS, int B>
void mix(E* out, const float* weights, const float* totals, const E* values, int64_t length, int64_t stride) {
    Vec sums[B][PARTS] = {};
    for (int64_t t = 0; t < length; ++t)
        for (int part = 0; part < PARTS; ++part) {
            const Vec value = load(values + (t * PARTS + part) * LANES);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) sums[b][part] += value * weights[b * stride + t];
        }
    for (int b = 0; b < B; ++b)
        for (int part = 0; part < PARTS; ++part)
            store(out + (b * PARTS + part) * LANES, sums[b][part] * (1.0f / totals[b]));
}

// The query heads of a group, over the keys and values of one head of one slot. PARTS vectors make a head, or 0: any number, and a
// rest.
template <class E, int PARTS>
void attend_group(E* out, const E* query, const E* keys, const E* values, int64_t group, int64_t length, int64_t dim,
                  float scale, std::vector<float>& scratch) {
    const int64_t padded = (length + LANES - 1) / LANES * LANES, vectors = dim / LANES * LANES;
    scratch.resize(group * (padded + dim + 1));
    float *scores = scratch.data(), *wide = scores + group * padded, *totals = wide + group * dim;
    for (int64_t i = 0; i < group * dim; ++i) wide[i] = get(query + i) * scale;
    for (int64_t t = 0; t < length; ++t) {
        const E* key = keys + t * dim;
        if constexpr (PARTS > 0) {
            Vec parts[PARTS];
            for (int part = 0; part < PARTS; ++part) parts[part] = load(key + part * LANES);
            for (int64_t g = 0; g < group; ++g) {
                Vec score = load(wide + g * dim) * parts[0];
                for (int part = 1; part < PARTS; ++part) score += load(wide + g * dim + part * LANES) * parts[part];
                scores[g * padded + t] = sum(score);
            }
        } else {
            for (int64_t g = 0; g < group; ++g) {
                Vec score{};
                for (int64_t d = 0; d < vectors; d += LANES) score += load(wide + g * dim + d) * load(key + d);
                float rest = sum(score);
                for (int64_t d = vectors; d < dim; ++d) rest += wide[g * dim + d] * get(key + d);
                scores[g * padded + t] = rest;
            }
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        float* row = scores + g * padded;
        for (int64_t t = length; t < padded; ++t) row[t] = -INFINITY;
        Vec tops = load(row);
        for (int64_t t = LANES; t < padded; t += LANES) {
            const Vec score = load(row + t);
            tops = score > tops ? score : tops;
        }
        float top = tops[0];
        for (int lane = 1; lane < LANES; ++lane) top = std::max(top, tops[lane]);
        Vec total{};
        for (int64_t t = 0; t < padded; t += LANES) {
            const Vec weight = exponential(load(row + t) - top);
            store(row + t, weight);
            total += weight;
        }
        totals[g] = sum(total);
    }
    int64_t g = 0;
    if constexpr (PARTS > 0) {
        constexpr int MOST = PARTS <= 4 ? 3 : 1;  // sums that fit the registers
        for (; g + MOST <= group; g += MOST)
            mix<E, PARTS, MOST>(out + g * dim, scores + g * padded, totals + g, values, length, padded);
        for (; g < group; ++g) mix<E, PARTS, 1>(out + g * dim, scores + g * padded, totals + g, values, length, padded);
    }
    for (; g < group; ++g) {
        const float* row = scores + g * padded;
        for (int64_t d = 0; d < dim; ++d) {
            float one = 0;
            for (int64_t t = 0; t < length; ++t) one += get(values + t * dim + d) * row[t];
            put(out + g * dim + d, one / totals[g]);
        }
    }
}

// Store keys and values, then attend: out[rows][heads * dim].
//   mixed[rows][heads + 2 * kv_heads][dim]  queries, keys and values of each row
//   keys, values                            of a layer, [slots][kv_heads][positions][dim] with the strides given
//   write_slot, write_position, write_row   [writes]
//   slot, length                            what each row attends to, [rows]
template <class E>
void store_and_attend(E* out, const E* mixed, E* keys, E* values, int64_t slot_stride, int64_t head_stride,
                      const int64_t* write_slot, const int64_t* write_position, const int64_t* write_row, int64_t writes,
                      const int64_t* slot, const int64_t* length, int64_t rows, int64_t heads, int64_t kv_heads,
                      int64_t dim, float scale) {
    const int64_t stride = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
    const auto attend = dim == 4 * LANES   ? attend_group<E, 4>
                        : dim == 8 * LANES ? attend_group<E, 8>
                        : dim == 2 * LANES ? attend_group<E, 2>
                                           : attend_group<E, 0>;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t w = 0; w < writes; ++w)
            for (int64_t head = 0; head < kv_heads; ++head) {
                const int64_t to = write_slot[w] * slot_stride + head * head_stride + write_position[w] * dim;
                const E* from = mixed + write_row[w] * stride + (heads + head) * dim;
                std::memcpy(keys + to, from, dim * sizeof(E));
                std::memcpy(values + to, from + kv_heads * dim, dim * sizeof(E));
            }
        std::vector<float> scratch;
#pragma omp for schedule(dynamic, 2)
        for (int64_t item = 0; item < rows * kv_heads; ++item) {
            const int64_t row = item / kv_heads, head = item % kv_heads;
            const int64_t at = slot[row] * slot_stride + head * head_stride;
            attend(out + row * heads * dim + head * group * dim, mixed + row * stride + head * group * dim, keys + at,
                       values + at, group, length[row], dim, scale, scratch);
        }
    }
}

}  // namespace
