// Thin factors of a matrix: made orthogonal, and multiplied; every sum in one order.
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

// The sum of the products of two columns, one after the other.
inline double dot(const double* a, const double* b, int64_t num) {
  double sum = 0;
  for (int64_t i = 0; i < num; ++i) sum += a[i] * b[i];
  return sum;
}

// Gram and Schmidt, column by column, everything before a column taken away twice. `columns` has room for all of them.
template <class T> inline void orthogonalise(T* matrix, int64_t rows, int64_t rank, double* columns) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < rank; ++k) columns[k * rows + i] = static_cast<double>(matrix[i * rank + k]);
  for (int64_t k = 0; k < rank; ++k) {
    double* __restrict column = columns + k * rows;
    for (int64_t turn = 0; turn < 2 * k; ++turn) {
      const double* __restrict before = columns + turn % k * rows;
      double share = dot(before, column, rows);
      for (int64_t i = 0; i < rows; ++i) column[i] -= share * before[i];
    }
    double norm = std::sqrt(dot(column, column, rows));
    double divisor = norm > 0 ? norm : 1.0;
    for (int64_t i = 0; i < rows; ++i) column[i] /= divisor;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < rank; ++k) matrix[i * rank + k] = static_cast<T>(columns[k * rows + i]);
}

}  // namespace weft
