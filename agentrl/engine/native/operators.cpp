// Operators of a decode step in float32 and bfloat16. Called through ctypes: plain pointers, no torch.
//
// All matrices are row-major; sums are float32. Nothing allocates but scratch; nothing throws.

#include "attention.h"
#include "products.h"
#include "sampling.h"

extern "C" {

int64_t panel_width() { return WIDTH; }

#if defined(__AVX512BF16__)
int64_t multiplies_bf16() { return 1; }
void pack_bf16(uint32_t* packed, uint32_t* copy, const uint32_t* weight, int64_t columns, int64_t depth) {
    pack(packed, copy, weight, columns, depth / 2);
}
void multiply_bf16(bf16* out, const bf16* x, const bf16* packed, const bf16* bias, const bf16* other, int64_t rows,
                   int64_t columns, int64_t depth, int64_t mode) {
    multiply(out, x, packed, bias, other, rows, columns, depth, mode);
}
void multiply_bf16_f32(float* out, const bf16* x, const bf16* packed, const bf16* bias, const bf16* other, int64_t rows,
                       int64_t columns, int64_t depth, int64_t mode) {
    multiply(out, x, packed, bias, other, rows, columns, depth, mode);
}
#else
int64_t multiplies_bf16() { return 0; }
#endif

void pack_f32(uint32_t* packed, uint32_t* copy, const uint32_t* weight, int64_t columns, int64_t depth) {
    pack(packed, copy, weight, columns, depth);
}
void multiply_f32(float* out, const float* x, const float* packed, const float* bias, const float* other, int64_t rows,
                  int64_t columns, int64_t depth, int64_t mode) {
    multiply(out, x, packed, bias, other, rows, columns, depth, mode);
}

#define FOR_ELEMENT(E, NAME)                                                                                              \
    /* out[rows][width] = weight * x / sqrt(mean(x^2) + epsilon) */                                                       \
    void rms_norm_##NAME(E* out, const E* x, const E* weight, int64_t rows, int64_t width, float epsilon) {               \
        _Pragma("omp parallel for schedule(static) if (rows * width > 16384)") for (int64_t row = 0; row < rows; ++row)   \
            normalise(out + row * width, x + row * width, weight, width, epsilon);                                        \
    }                                                                                                                     \
    void rotate_##NAME(E* mixed, const E* cosine, const E* sine, const E* query_norm, const E* key_norm, int64_t tokens,  \
                       int64_t heads, int64_t kv_heads, int64_t dim, float epsilon) {                                     \
        rotate(mixed, cosine, sine, query_norm, key_norm, tokens, heads, kv_heads, dim, epsilon);                         \
    }                                                                                                                     \
    void store_and_attend_##NAME(E* out, const E* mixed, E* keys, E* values, int64_t slot_stride, int64_t head_stride,    \
                                 const int64_t* write_slot, const int64_t* write_position, const int64_t* write_row,      \
                                 int64_t writes, const int64_t* slot, const int64_t* length, int64_t rows, int64_t heads, \
                                 int64_t kv_heads, int64_t dim, float scale) {                                            \
        store_and_attend(out, mixed, keys, values, slot_stride, head_stride, write_slot, write_position, write_row,       \
                         writes, slot, length, rows, heads, kv_heads, dim, scale);                                        \
    }                                                                                                                     \
    void sample_##NAME(int64_t* tokens, double* logprobs, uint8_t* broken, const E* logits, const float* temperatures,    \
                       const uint8_t* greedy, const double* uniforms, int64_t rows, int64_t vocab) {                      \
        sample(tokens, logprobs, broken, logits, temperatures, greedy, uniforms, rows, vocab);                            \
    }

FOR_ELEMENT(float, f32)
FOR_ELEMENT(bf16, bf16)
}
