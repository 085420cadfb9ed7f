// Numbers as their bits, the counter-based generator, and sums in a fixed order: see definition.py and random.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace weft {

template <class T> struct Word;
template <> struct Word<float> {
  using type = int32_t;
  static constexpr type largest = INT32_MAX;
  static constexpr type nan = 0x7F800001;
};
template <> struct Word<double> {
  using type = int64_t;
  static constexpr type largest = INT64_MAX;
  static constexpr type nan = 0x7FF0000000000001;
};
template <class T> using word_of = typename Word<T>::type;

template <class To, class From> inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bits of |x|, which order magnitudes. Not-a-numbers of several kinds are yet to be made alike.
template <class T> inline word_of<T> magnitude(T x) { return bits_as<word_of<T>>(x) & Word<T>::largest; }

inline uint32_t mix(uint32_t counter, uint32_t low, uint32_t high) {
  uint32_t state = counter ^ low;
  state ^= state >> 16;
  state *= 0x7FEB352Du;
  state ^= (state >> 15) ^ high;
  state *= 0x846CA68Bu;
  return state ^ (state >> 16);
}

inline float uniform(uint32_t counter, uint32_t low, uint32_t high) {
  return static_cast<float>(static_cast<int32_t>(mix(counter, low, high) >> 8)) * 0x1p-24f;
}

constexpr int LANES = 8;

struct Lanes {
  double sums[LANES] = {};

  double total() const {
    double halves[4];
    for (int j = 0; j < 4; ++j) halves[j] = sums[j] + sums[j + 4];
    return (halves[0] + halves[2]) + (halves[1] + halves[3]);
  }
};

// Lane j of `lanes` takes value_of(x[j]), value_of(x[j + 8]), ... in order.
template <class T, class Function> inline double add_up(const T* x, int64_t num, Function value_of) {
  Lanes lanes;
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES)
    for (int j = 0; j < LANES; ++j) lanes.sums[j] += value_of(static_cast<double>(x[i + j]));
  for (int j = 0; i + j < num; ++j) lanes.sums[j] += value_of(static_cast<double>(x[i + j]));
  return lanes.total();
}

}  // namespace weft
