// Encoding and decoding of 8-bit types, block by block; eight_bit.py has the layout and the same in torch.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
constexpr uint8_t kNotFinite = 0x80;
constexpr int kShift = 16;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The largest finite magnitude: as whole numbers the bits of magnitudes are in the same order.
float largest_of(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]) & kMagnitude;
    const uint32_t finite = bits < kInfinity ? bits : 0;
    most = finite > most ? finite : most;
  }
  return from_bits(most);
}

void encode_linear(const float* x, int64_t n, float divisor, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const bool is_finite = (bits_of(x[i]) & kMagnitude) < kInfinity;
    const float level = is_finite ? std::nearbyint(x[i] / divisor * 127.0f) : -128.0f;
    codes[i] = static_cast<uint8_t>(static_cast<int32_t>(level));
  }
}

struct Tree {
  const int32_t* first;
  const float* thresholds;
  const uint8_t* codes;
};

void encode_tree(const float* x, int64_t n, float divisor, const Tree& tree, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]);
    if ((bits & kMagnitude) >= kInfinity) {
      codes[i] = kNotFinite;
      continue;
    }
    const float magnitude = from_bits(bits & kMagnitude) / divisor;
    int32_t place = tree.first[bits_of(magnitude) >> kShift];
    place += magnitude > tree.thresholds[place];
    const uint8_t sign = place ? static_cast<uint8_t>(bits >> 24) & 0x80 : 0;
    codes[i] = tree.codes[place] | sign;
  }
}

}  // namespace

extern "C" {

// Scales, one for each block, and codes, one for each number. Without `first` the type is linear.
void weft_encode_eight_bit(const float* x, int64_t n, int64_t block, const int32_t* first, const float* thresholds,
                           const uint8_t* places, uint8_t* scales, uint8_t* codes) {
  for (int64_t begin = 0, number = 0; begin < n; begin += block, ++number) {
    const int64_t length = n - begin < block ? n - begin : block;
    const float scale = largest_of(x + begin, length);
    std::memcpy(scales + number * sizeof scale, &scale, sizeof scale);
    const float divisor = scale > 0 ? scale : 1.0f;
    if (first == nullptr) {
      encode_linear(x + begin, length, divisor, codes + begin);
    } else {
      encode_tree(x + begin, length, divisor, {first, thresholds, places}, codes + begin);
    }
  }
}

void weft_decode_eight_bit(const uint8_t* scales, const uint8_t* codes, int64_t n, int64_t block, const float* values,
                           float* out) {
  for (int64_t begin = 0, number = 0; begin < n; begin += block, ++number) {
    const int64_t end = n - begin < block ? n : begin + block;
    float scale;
    std::memcpy(&scale, scales + number * sizeof scale, sizeof scale);
    for (int64_t i = begin; i < end; ++i) out[i] = values[codes[i]] * scale;
  }
}

}  // extern "C"
