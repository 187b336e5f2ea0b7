// One token per row from logits: inverse of the cumulative distribution over blocks, then inside one block.

#pragma once

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t SAMPLE_BLOCK = 128;  // as in sampling.py

// weights[count] = exp((logits - top) * inverse); their sum
template <class E>
double weigh(float* weights, const E* logits, int64_t count, float top, float inverse) {
    Vec total{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vec weight = exponential((load(logits + i) - top) * inverse);
        store(weights + i, weight);
        total += weight;
    }
    float rest = sum(total);
    for (; i < count; ++i) rest += weights[i] = exponential(all((get(logits + i) - top) * inverse))[0];
    return rest;
}

// Index of the first of count numbers at which their running sum passes target; the last positive one if none does.
template <class N>
int64_t passes(const N* numbers, int64_t count, double target, double& before) {
    double running = 0;
    int64_t last = 0;
    double until = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (numbers[i] > 0) last = i, until = running;
        running += numbers[i];
        if (running > target && numbers[i] > 0) break;
    }
    before = until;
    return last;
}

// tokens[rows], logprobs[rows] and broken[rows] from logits[rows][vocab]; uniforms in [0, 1), one of which is used for each row
// that is not greedy. The logprob is that of softmax(logits / temperature), of greedy rows at temperature 1.
template <class E>
void sample(int64_t* tokens, double* logprobs, uint8_t* broken, const E* logits, const float* temperatures,
            const uint8_t* greedy, const double* uniforms, int64_t rows, int64_t vocab) {
    const int64_t blocks = (vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
#pragma omp parallel
    {
        std::vector<double> sums(blocks);
        float weights[SAMPLE_BLOCK];
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; ++row) {
            const E* x = logits + row * vocab;
            const float inverse = greedy[row] ? 1.0f : 1.0f / temperatures[row];
            Vec tops = all(-INFINITY);
            int64_t i = 0;
            for (; i + LANES <= vocab; i += LANES) {
                const Vec value = load(x + i);
                tops = value > tops ? value : tops;
            }
            float top = -INFINITY;
            for (int lane = 0; lane < LANES; ++lane) top = std::max(top, tops[lane]);
            for (; i < vocab; ++i) top = std::max(top, get(x + i));
            double total = 0;
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t start = b * SAMPLE_BLOCK, count = std::min(SAMPLE_BLOCK, vocab - start);
                total += sums[b] = weigh(weights, x + start, count, top, inverse);
            }
            broken[row] = !std::isfinite(total) || !std::isfinite(top);
            int64_t token = 0;
            if (!broken[row] && greedy[row]) {
                while (get(x + token) != top) ++token;
            } else if (!broken[row]) {
                double before, inside;
                const double target = uniforms[row] * total;
                const int64_t block = passes(sums.data(), blocks, target, before), start = block * SAMPLE_BLOCK;
                const int64_t count = std::min(SAMPLE_BLOCK, vocab - start);
                weigh(weights, x + start, count, top, inverse);
                double within = 0;
                for (int64_t k = 0; k < count; ++k) within += weights[k];
                // the place inside the block is a fraction of it, so float32 block sums cost no token its chance
                const double fraction = std::min(1.0, std::max(0.0, (target - before) / sums[block]));
                token = start + passes(weights, count, fraction * within, inside);
            }
            tokens[row] = token;
            logprobs[row] = (static_cast<double>(get(x + token)) - top) * inverse - std::log(total);
        }
    }
}

}  // namespace
