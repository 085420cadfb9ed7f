// The C interface of the kernels: each function once for float (f32) and once for double (f64).
#include "low_rank.h"
#include "quantise.h"
#include "select.h"
#include "sparse.h"

using namespace weft;

#define FOR_TYPE(T, S)                                                                                                 \
  extern "C" void weft_add_##S(T* kept, const T* message, double scale, T* velocity, double momentum, int nesterov,    \
                               int64_t num) {                                                                          \
    with_update<T>(kept, message, scale, velocity, momentum, nesterov, [=](auto update) { apply_all(update, num); });  \
  }                                                                                                                    \
  extern "C" void weft_select_##S(T* kept, const T* message, double scale, T* velocity, double momentum, int nesterov, \
                                  int64_t num, int64_t wanted, word_of<T>* words, word_of<T>* scratch,                 \
                                  int32_t* indices, int64_t capacity, int32_t* chosen) {                               \
    Candidates<T> candidates{words, scratch, indices, capacity, wanted, 0, -1};                                        \
    with_update<T>(kept, message, scale, velocity, momentum, nesterov,                                                 \
                   [=](auto update) { select_largest<T>(update, num, candidates, chosen); });                          \
  }                                                                                                                    \
  extern "C" int64_t weft_select_above_##S(T* kept, const T* message, double scale, T* velocity, double momentum,      \
                                           int nesterov, int64_t num, double threshold, int32_t* chosen) {             \
    word_of<T> bound = magnitude<T>(static_cast<T>(threshold)) - 1;                                                    \
    return with_update<T>(kept, message, scale, velocity, momentum, nesterov,                                          \
                          [=](auto update) { return select_above<T>(update, num, bound, chosen); });                   \
  }                                                                                                                    \
  extern "C" void weft_take_##S(T* kept, const int32_t* indices, int64_t num, T* values) {                             \
    take(kept, indices, num, values);                                                                                  \
  }                                                                                                                    \
  extern "C" void weft_scatter_add_##S(T* dense, const int32_t* indices, const T* values, int64_t num) {               \
    scatter_add(dense, indices, values, num);                                                                          \
  }                                                                                                                    \
  extern "C" int64_t weft_merge_##S(const int32_t* indices_a, const T* values_a, int64_t num_a,                        \
                                    const int32_t* indices_b, const T* values_b, int64_t num_b, int32_t* indices,      \
                                    T* values) {                                                                       \
    return merge(Merge<T>{indices_a, values_a, indices_b, values_b, indices, values}, num_a, num_b);                   \
  }                                                                                                                    \
  extern "C" void weft_block_norms_##S(const T* x, int64_t num, int64_t block, int is_l2, float* norms) {              \
    for (int64_t start = 0; start < num; start += block) {                                                             \
      int64_t count = std::min(block, num - start);                                                                    \
      norms[start / block] = is_l2 ? l2_norm(x + start, count) : max_norm(x + start, count);                           \
    }                                                                                                                  \
  }                                                                                                                    \
  extern "C" void weft_quantise_##S(const T* x, const float* norms, int64_t num, int64_t block, int bits,              \
                                    uint32_t low, uint32_t high, uint8_t* codes) {                                     \
    auto call = bits == 2 ? quantise<2, T> : bits == 4 ? quantise<4, T> : quantise<8, T>;                              \
    call(x, norms, num, block, low, high, codes);                                                                      \
  }                                                                                                                    \
  extern "C" void weft_dequantise_##S(const uint8_t* codes, const float* norms, int64_t num, int64_t block, int bits,  \
                                      int is_added, T* out) {                                                          \
    auto set = bits == 2 ? dequantise<2, false, T> : bits == 4 ? dequantise<4, false, T> : dequantise<8, false, T>;    \
    auto add = bits == 2 ? dequantise<2, true, T> : bits == 4 ? dequantise<4, true, T> : dequantise<8, true, T>;       \
    (is_added ? add : set)(codes, norms, num, block, out);                                                             \
  }                                                                                                                    \
  extern "C" void weft_encode_signs_##S(T* kept, int64_t num, int64_t block, int symmetric, uint8_t* codes,            \
                                        float* highs, float* lows) {                                                   \
    encode_signs(kept, num, block, symmetric, codes, highs, lows);                                                     \
  }                                                                                                                    \
  extern "C" void weft_decode_signs_##S(const uint8_t* codes, const float* highs, const float* lows, int64_t num,      \
                                        int64_t block, int is_added, T* out) {                                         \
    (is_added ? decode_signs<true, T> : decode_signs<false, T>)(codes, highs, lows, num, block, out);                  \
  }                                                                                                                    \
  extern "C" void weft_multiply_factors_##S(const T* left, const T* right, int64_t rows, int64_t columns,              \
                                            int64_t rank, T* out) {                                                    \
    multiply_factors(left, right, rows, columns, rank, out);                                                           \
  }                                                                                                                    \
  extern "C" void weft_orthogonalise_##S(T* matrix, int64_t rows, int64_t rank, double* columns) {                     \
    orthogonalise(matrix, rows, rank, columns);                                                                        \
  }

FOR_TYPE(float, f32)
FOR_TYPE(double, f64)

extern "C" void weft_uniform(uint32_t low, uint32_t high, int64_t num, float* out) {
  for (int64_t i = 0; i < num; ++i) out[i] = uniform(static_cast<uint32_t>(i), low, high);
}

extern "C" int weft_are_within(const int32_t* indices, int64_t num, int64_t num_elements) {
  return are_within(indices, num, num_elements);
}

extern "C" int weft_are_ascending(const int32_t* indices, int64_t num) { return are_ascending(indices, num); }
