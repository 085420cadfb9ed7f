// The product of two thin factors, every number of it added up in the order of columns.
#pragma once

#include "words.h"

namespace weft {

constexpr int64_t TILE = 1024;  // numbers of a row that stay in the nearest cache while columns are added

// out[i, j] = sum over k of left[i, k] right[k, j], with `right` the transposed factor.
template <class T>
inline void multiply_factors(const T* left, const T* right, int64_t rows, int64_t columns, int64_t rank, T* out) {
  for (int64_t first = 0; first < columns; first += TILE) {
    int64_t num = std::min(TILE, columns - first);
    for (int64_t i = 0; i < rows; ++i) {
      T* __restrict into = out + i * columns + first;
      for (int64_t k = 0; k < rank; ++k) {
        const T* __restrict from = right + k * columns + first;
        T factor = left[i * rank + k];
        if (k == 0) {
          for (int64_t j = 0; j < num; ++j) into[j] = factor * from[j];
        } else {
          for (int64_t j = 0; j < num; ++j) into[j] += factor * from[j];
        }
      }
    }
  }
}

}  // namespace weft
