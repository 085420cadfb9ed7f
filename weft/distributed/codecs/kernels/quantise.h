// Norms of blocks, levels that are rounded at random, and signs with the means of both sides.
#pragma once

#include "packing.h"

namespace weft {

template <class T> inline float l2_norm(const T* x, int64_t num) {
  return static_cast<float>(std::sqrt(add_up(x, num, [](double value) { return value * value; })));
}

template <class T> inline float max_norm(const T* x, int64_t num) {
  word_of<T> largest = 0;
  for (int64_t i = 0; i < num; ++i) largest = std::max(largest, magnitude(x[i]));
  return static_cast<float>(bits_as<T>(largest));
}

template <int bits, class T>
inline void quantise(const T* x, const float* norms, int64_t num, int64_t block, uint32_t low, uint32_t high,
                     uint8_t* packed) {
  constexpr int top = (1 << (bits - 1)) - 1;
  constexpr float limit = top;
  Packer<bits> packer{packed};
  for (int64_t start = 0; start < num; start += block) {
    int64_t end = std::min(num, start + block);
    float norm = norms[start / block], factor = limit / norm;
    bool is_usable = std::isfinite(norm) && std::isfinite(factor);
    for (int64_t i = start; i < end;) {
      int portion = packer.room(end - i);
      uint8_t* codes = packer.next();
      if (!is_usable) {
        std::memset(codes, 0, portion);
      } else {
        const T* from = x + i;
        uint32_t counter = static_cast<uint32_t>(i);
#pragma GCC ivdep
        for (int j = 0; j < portion; ++j) {
          float value = static_cast<float>(from[j]);
          float ratio = std::fabs(value) * factor;
          ratio = ratio < limit ? ratio : limit;
          int32_t level = static_cast<int32_t>(ratio + uniform(counter + j, low, high));
          uint32_t sign = bits_as<uint32_t>(value) >> 31;
          codes[j] = static_cast<uint8_t>(std::min(level, top) | sign << (bits - 1));
        }
      }
      packer.advance(portion);
      i += portion;
    }
  }
  packer.flush();
}

template <bool is_added, class T> inline void put(T& out, T value) { out = is_added ? out + value : value; }

template <int bits, bool is_added, class T>
inline void dequantise(const uint8_t* packed, const float* norms, int64_t num, int64_t block, T* out) {
  constexpr int top = (1 << (bits - 1)) - 1;
  Unpacker<bits> unpacker{packed, packed + (num * bits + 7) / 8};
  for (int64_t start = 0; start < num; start += block) {
    int64_t end = std::min(num, start + block);
    float unit = norms[start / block] / static_cast<float>(top);
    for (int64_t i = start; i < end;) {
      int portion = unpacker.room(end - i);
      const uint8_t* codes = unpacker.next();
      T* into = out + i;
#pragma GCC ivdep
      for (int j = 0; j < portion; ++j) {
        uint32_t code = codes[j];
        float value = static_cast<float>(static_cast<int32_t>(code & top)) * unit;
        value = bits_as<float>(bits_as<uint32_t>(value) ^ (code >> (bits - 1)) << 31);
        put<is_added>(into[j], static_cast<T>(value));
      }
      unpacker.advance(portion);
      i += portion;
    }
  }
}

inline float mean_of(double sum, int64_t count) {
  return static_cast<float>(sum / static_cast<double>(std::max<int64_t>(count, 1)));
}

template <class T>
inline void encode_signs(T* kept, int64_t num, int64_t block, int symmetric, uint8_t* packed, float* highs,
                         float* lows) {
  Packer<1> packer{packed};
  for (int64_t start = 0; start < num; start += block) {
    int64_t end = std::min(num, start + block), count = end - start;
    T* x = kept + start;
    float high, low;
    if (symmetric) {
      high = mean_of(add_up(x, count, [](double value) { return std::fabs(value); }), count);
      low = -high;
    } else {
      int64_t num_high = 0;
      for (int64_t i = 0; i < count; ++i) num_high += x[i] >= 0;
      high = mean_of(add_up(x, count, [](double value) { return value >= 0 ? value : 0.0; }), num_high);
      low = mean_of(add_up(x, count, [](double value) { return value >= 0 ? 0.0 : value; }), count - num_high);
    }
    highs[start / block] = high;
    lows[start / block] = low;
    T wide_high = high, wide_low = low;
    for (int64_t i = 0; i < count;) {
      int portion = packer.room(count - i);
      uint8_t* codes = packer.next();
#pragma GCC ivdep
      for (int j = 0; j < portion; ++j) {
        T value = x[i + j];
        codes[j] = value >= 0;
        x[i + j] = value - (value >= 0 ? wide_high : wide_low);
      }
      packer.advance(portion);
      i += portion;
    }
  }
  packer.flush();
}

template <bool is_added, class T>
inline void decode_signs(const uint8_t* packed, const float* highs, const float* lows, int64_t num, int64_t block,
                         T* out) {
  Unpacker<1> unpacker{packed, packed + (num + 7) / 8};
  for (int64_t start = 0; start < num; start += block) {
    int64_t end = std::min(num, start + block);
    T high = highs[start / block], low = lows[start / block];
    for (int64_t i = start; i < end;) {
      int portion = unpacker.room(end - i);
      const uint8_t* codes = unpacker.next();
      T* into = out + i;
#pragma GCC ivdep
      for (int j = 0; j < portion; ++j) put<is_added>(into[j], codes[j] ? high : low);
      unpacker.advance(portion);
      i += portion;
    }
  }
}

}  // namespace weft
