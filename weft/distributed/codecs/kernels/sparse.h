// Streams of places and values.
#pragma once

#include "words.h"

namespace weft {

template <class T> inline void take(T* kept, const int32_t* indices, int64_t num, T* values) {
  for (int64_t i = 0; i < num; ++i) {
    values[i] = kept[indices[i]];
    kept[indices[i]] = 0;
  }
}

template <class T> inline void scatter_add(T* dense, const int32_t* indices, const T* values, int64_t num) {
  for (int64_t i = 0; i < num; ++i) dense[indices[i]] += values[i];
}

inline bool are_within(const int32_t* indices, int64_t num, int64_t num_elements) {
  uint32_t largest = 0;  // a negative place is larger than any
  for (int64_t i = 0; i < num; ++i) largest = std::max(largest, static_cast<uint32_t>(indices[i]));
  return num == 0 || largest < static_cast<uint64_t>(num_elements);
}

inline bool are_ascending(const int32_t* indices, int64_t num) {
  int wrong = num > 0 && indices[0] < 0;
  for (int64_t i = 1; i < num; ++i) wrong |= indices[i] <= indices[i - 1];
  return wrong == 0;
}

// A part of two streams that are merged, and where its sum goes: places in the streams.
struct Part {
  int64_t a, end_a, b, end_b, found;
  int64_t num_safe() const { return std::min(end_a - a, end_b - b); }
};

template <class T> struct Merge {
  const int32_t* __restrict indices_a;
  const T* __restrict values_a;
  const int32_t* __restrict indices_b;
  const T* __restrict values_b;
  int32_t* __restrict indices;
  T* __restrict values;

  // One place of the sum. No branch depends on the data: which stream is ahead is as good as a coin.
  void step(Part& part) const {
    int32_t place_a = indices_a[part.a], place_b = indices_b[part.b];
    bool has_a = place_a <= place_b, has_b = place_b <= place_a;
    T choices[4] = {0, values_a[part.a], values_b[part.b], values_a[part.a] + values_b[part.b]};
    indices[part.found] = std::min(place_a, place_b);
    values[part.found++] = choices[has_a + 2 * has_b];
    part.a += has_a;
    part.b += has_b;
  }

  void finish(Part& part) const {
    while (part.a < part.end_a && part.b < part.end_b) step(part);
    copy_rest(indices_a, values_a, part.a, part.end_a, part.found);
    copy_rest(indices_b, values_b, part.b, part.end_b, part.found);
  }

  void copy_rest(const int32_t* from_indices, const T* from_values, int64_t start, int64_t end, int64_t& found) const {
    std::copy(from_indices + start, from_indices + end, indices + found);
    std::copy(from_values + start, from_values + end, values + found);
    found += end - start;
  }
};

// Where in both streams the sum is cut so that about `before` of their places lie before: none is in both parts.
inline void find_cut(const int32_t* a, int64_t num_a, const int32_t* b, int64_t num_b, int64_t before, Part& part) {
  int64_t low = std::max<int64_t>(0, before - num_b), high = std::min(before, num_a);
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (a[middle] < b[before - middle - 1]) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  part.a = low;
  part.b = before - low;
  if (part.a > 0 && part.b < num_b && a[part.a - 1] == b[part.b]) --part.a;
  if (part.b > 0 && part.a < num_a && b[part.b - 1] == a[part.a]) --part.b;
}

constexpr int NUM_PARTS = 2;
constexpr int64_t FEW = 16;

// The sum of two streams; returns how many places it has. Each step waits for the one before it, so two parts of the
// sum take turns, and the processor works on both at once (more parts want more registers than there are). Then they
// are moved together.
template <class T> inline int64_t merge(Merge<T> merge, int64_t num_a, int64_t num_b) {
  Part middle{};
  find_cut(merge.indices_a, num_a, merge.indices_b, num_b, (num_a + num_b) / 2, middle);
  Part parts[NUM_PARTS] = {{0, middle.a, 0, middle.b, 0}, {middle.a, num_a, middle.b, num_b, middle.a + middle.b}};
  int64_t starts[NUM_PARTS] = {parts[0].found, parts[1].found};
  for (;;) {
    int64_t steps = std::min(parts[0].num_safe(), parts[1].num_safe());
    if (steps < FEW) break;
    Part first = parts[0], second = parts[1];
    for (int64_t i = 0; i < steps; ++i) {
      merge.step(first);
      merge.step(second);
    }
    parts[0] = first;
    parts[1] = second;
  }
  int64_t found = 0;
  for (int k = 0; k < NUM_PARTS; ++k) {
    merge.finish(parts[k]);
    int64_t num = parts[k].found - starts[k];
    std::memmove(merge.indices + found, merge.indices + starts[k], num * sizeof(int32_t));
    std::memmove(merge.values + found, merge.values + starts[k], num * sizeof(T));
    found += num;
  }
  return found;
}

}  // namespace weft
