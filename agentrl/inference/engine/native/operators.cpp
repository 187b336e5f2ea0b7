// Operators of a decode step in float32, for any CPU that the compiler knows. Called through ctypes: plain pointers, no torch.
//
// All matrices are row-major. Nothing allocates but the scratch of attention; nothing throws.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // 24 sums, 2 weights and a broadcast in 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;  // 12 sums in 16 registers
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int WIDTH = 2 * LANES;     // columns of a panel
constexpr int64_t BLOCK_ROWS = 96;   // rows that stay in the second-level cache while the weights pass by

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
inline Vec all(float value) { return Vec{} + value; }

inline float sum(Vec value) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += value[lane];
    return total;
}

// e^x to about two units in the last place; NaN stays NaN, large values saturate.
inline Vec exponential(Vec x) {
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
    return p * reinterpret_cast<Vec&>(exponent);
}

enum Mode { NONE = 0, SWISH = 1, PLUS = 2, TIMES = 3 };

template <int R>
inline void product(float* out, const float* x, const float* panel, const float* bias, const float* other, int64_t count,
                    int64_t depth, int64_t columns, int mode) {
    Vec sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Vec{};
    for (int64_t k = 0; k < depth; ++k) {
        const Vec first = load(panel + k * WIDTH), second = load(panel + k * WIDTH + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const float value = x[r * depth + k];
            sums[r][0] += first * value;
            sums[r][1] += second * value;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        float row[WIDTH];
        for (int half = 0; half < 2; ++half) {
            Vec value = sums[r][half];
            if (bias) value += load(bias + half * LANES);
            if (mode == SWISH) value = value / (1.0f + exponential(-value));
            store(row + half * LANES, value);
        }
        float* to = out + r * columns;
        if (mode == PLUS)
            for (int64_t c = 0; c < count; ++c) to[c] = row[c] + other[r * columns + c];
        else if (mode == TIMES)
            for (int64_t c = 0; c < count; ++c) to[c] = row[c] * other[r * columns + c];
        else
            std::memcpy(to, row, count * sizeof(float));
    }
}

typedef void (*Kernel)(float*, const float*, const float*, const float*, const float*, int64_t, int64_t, int64_t, int);

template <int... R>
struct Kernels {
    Kernel of[sizeof...(R) + 1] = {nullptr, product<R>...};
};
#if defined(__AVX512F__)
const Kernels<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12> KERNELS;
#else
const Kernels<1, 2, 3, 4, 5, 6> KERNELS;
#endif

// One query vector per query head of a group, over the keys and values of one head of one slot.
void attend_one(float* out, const float* query, const float* keys, const float* values, int64_t group, int64_t length,
                int64_t dim, float scale, std::vector<float>& scratch) {
    const int64_t padded = (length + LANES - 1) / LANES * LANES;
    scratch.resize(padded);
    float* scores = scratch.data();
    for (int64_t g = 0; g < group; ++g) {
        const float* q = query + g * dim;
        float top = -INFINITY;
        for (int64_t t = 0; t < length; ++t) {
            const float* k = keys + t * dim;
            Vec first{}, second{};
            int64_t d = 0;
            for (; d + WIDTH <= dim; d += WIDTH) {
                first += load(q + d) * load(k + d);
                second += load(q + d + LANES) * load(k + d + LANES);
            }
            for (; d + LANES <= dim; d += LANES) first += load(q + d) * load(k + d);
            float score = sum(first + second);
            for (; d < dim; ++d) score += q[d] * k[d];
            scores[t] = score * scale;
            top = std::max(top, scores[t]);
        }
        for (int64_t t = length; t < padded; ++t) scores[t] = -INFINITY;
        Vec total{};
        for (int64_t t = 0; t < padded; t += LANES) {
            Vec weight = exponential(load(scores + t) - top);
            for (int lane = 0; lane < LANES; ++lane)
                if (t + lane >= length) weight[lane] = 0;
            store(scores + t, weight);
            total += weight;
        }
        const float inverse = 1.0f / sum(total);
        float* to = out + g * dim;
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) {
            Vec sums[4] = {};
            for (int64_t t = 0; t < length; ++t)
                for (int part = 0; part < 4; ++part) sums[part] += load(values + t * dim + d + part * LANES) * scores[t];
            for (int part = 0; part < 4; ++part) store(to + d + part * LANES, sums[part] * inverse);
        }
        for (; d < dim; ++d) {
            float one = 0;
            for (int64_t t = 0; t < length; ++t) one += values[t * dim + d] * scores[t];
            to[d] = one * inverse;
        }
    }
}

void normalise(float* out, const float* x, const float* weight, int64_t width, float epsilon) {
    Vec total{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total += load(x + i) * load(x + i);
    float squares = sum(total);
    for (; i < width; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / width + epsilon);
    for (i = 0; i < width; ++i) out[i] = weight[i] * (x[i] * scale);
}

}  // namespace

extern "C" {

int64_t panel_width() { return WIDTH; }

// packed[panel][depth][WIDTH] from weight[columns][depth]; missing columns are zero.
void pack(float* packed, const float* weight, int64_t columns, int64_t depth) {
    const int64_t panels = (columns + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
        float* to = packed + p * depth * WIDTH;
        for (int64_t c = 0; c < WIDTH; ++c) {
            const int64_t column = p * WIDTH + c;
            if (column < columns)
                for (int64_t k = 0; k < depth; ++k) to[k * WIDTH + c] = weight[column * depth + k];
            else
                for (int64_t k = 0; k < depth; ++k) to[k * WIDTH + c] = 0;
        }
    }
}

// out[rows][columns] = x[rows][depth] times the packed weight, plus bias (padded to whole panels, or null), then by mode:
// as it is, swish, plus other, times other.
void multiply(float* out, const float* x, const float* packed, const float* bias, const float* other, int64_t rows,
              int64_t columns, int64_t depth, int64_t mode) {
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
                    KERNELS.of[take](out + row * columns + column, x + row * depth, packed + p * depth * WIDTH,
                                     bias ? bias + column : nullptr, other ? other + row * columns + column : nullptr,
                                     count, depth, columns, static_cast<int>(mode));
                    row += take;
                }
            }
        }
    }
}

// out[rows][width] = weight * x / sqrt(mean(x^2) + epsilon)
void rms_norm(float* out, const float* x, const float* weight, int64_t rows, int64_t width, float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t row = 0; row < rows; ++row) normalise(out + row * width, x + row * width, weight, width, epsilon);
}

// Queries and keys of mixed[tokens][heads + 2 * kv_heads][dim], in place: their own norms where there are some, then rotation by
// cosine and sine[tokens][dim / 2].
void rotate(float* mixed, const float* cosine, const float* sine, const float* query_norm, const float* key_norm,
            int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, float epsilon) {
    const int64_t half = dim / 2, stride = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) if (tokens > 4)
    for (int64_t token = 0; token < tokens; ++token) {
        const float *c = cosine + token * half, *s = sine + token * half;
        for (int64_t head = 0; head < heads + kv_heads; ++head) {
            float* x = mixed + token * stride + head * dim;
            const float* norm = head < heads ? query_norm : key_norm;
            if (norm) normalise(x, x, norm, dim, epsilon);
            for (int64_t i = 0; i < half; ++i) {
                const float first = x[i], second = x[i + half];
                x[i] = first * c[i] - second * s[i];
                x[i + half] = second * c[i] + first * s[i];
            }
        }
    }
}

// Store keys and values, then attend: out[rows][heads * dim].
//   mixed[rows][heads + 2 * kv_heads][dim]  queries, keys and values of each row
//   keys, values                            of a layer, [slots][kv_heads][positions][dim] with the strides given
//   write_slot, write_position, write_row   [writes]
//   slot, length                            what each row attends to, [rows]
void store_and_attend(float* out, const float* mixed, float* keys, float* values, int64_t slot_stride, int64_t head_stride,
                      const int64_t* write_slot, const int64_t* write_position, const int64_t* write_row, int64_t writes,
                      const int64_t* slot, const int64_t* length, int64_t rows, int64_t heads, int64_t kv_heads,
                      int64_t dim, float scale) {
    const int64_t stride = (heads + 2 * kv_heads) * dim, group = heads / kv_heads;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t w = 0; w < writes; ++w)
            for (int64_t head = 0; head < kv_heads; ++head) {
                const int64_t to = write_slot[w] * slot_stride + head * head_stride + write_position[w] * dim;
                const float* from = mixed + write_row[w] * stride + (heads + head) * dim;
                std::memcpy(keys + to, from, dim * sizeof(float));
                std::memcpy(values + to, from + kv_heads * dim, dim * sizeof(float));
            }
        std::vector<float> scratch;
#pragma omp for schedule(dynamic, 2)
        for (int64_t item = 0; item < rows * kv_heads; ++item) {
            const int64_t row = item / kv_heads, head = item % kv_heads;
            const int64_t at = slot[row] * slot_stride + head * head_stride;
            attend_one(out + row * heads * dim + head * group * dim, mixed + row * stride + head * group * dim, keys + at,
                       values + at, group, length[row], dim, scale, scratch);
        }
    }
}
}
