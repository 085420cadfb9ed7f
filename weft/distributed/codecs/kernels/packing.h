// Codes of 1, 2, 4 or 8 bits, the first of a byte in its low bits, by way of a buffer of a byte for each.
//
//   codes  c0 c1 c2 c3 c4 ...   one byte each, as a vector loop likes them
//   bytes  c1c0 c3c2 ...        (4 bits)
//
// Words are put together as on a little-endian machine.
#pragma once

#include "words.h"

namespace weft {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <class W> inline W load(const uint8_t* bytes) {
  W word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

template <int bits> inline void pack(const uint8_t* __restrict codes, int64_t num_bytes, uint8_t* __restrict packed) {
  for (int64_t i = 0; i < num_bytes; ++i) {
    if constexpr (bits == 8) {
      packed[i] = codes[i];
    } else if constexpr (bits == 4) {
      uint16_t word = load<uint16_t>(codes + 2 * i);
      packed[i] = static_cast<uint8_t>(word | word >> 4);
    } else if constexpr (bits == 2) {
      uint32_t word = load<uint32_t>(codes + 4 * i);
      packed[i] = static_cast<uint8_t>(word | word >> 6 | word >> 12 | word >> 18);
    } else {
      packed[i] = static_cast<uint8_t>(load<uint64_t>(codes + 8 * i) * 0x0102040810204080u >> 56);
    }
  }
}

template <int bits> inline void unpack(const uint8_t* __restrict packed, int64_t num_bytes, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < num_bytes; ++i) {
    if constexpr (bits == 8) {
      codes[i] = packed[i];
    } else if constexpr (bits == 4) {
      uint16_t byte = packed[i], word = static_cast<uint16_t>((byte | byte << 4) & 0x0F0F);
      std::memcpy(codes + 2 * i, &word, sizeof word);
    } else if constexpr (bits == 2) {
      uint32_t byte = packed[i], word = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
      std::memcpy(codes + 4 * i, &word, sizeof word);
    } else {
      uint64_t byte = packed[i];
      uint64_t word = (byte * 0x0101010101010101u) & 0x8040201008040201u;  // each bit in a byte of its own
      word = ((word + 0x7F7F7F7F7F7F7F7Fu) >> 7) & 0x0101010101010101u;
      std::memcpy(codes + 8 * i, &word, sizeof word);
    }
  }
}

constexpr int BUFFER = 1024;

// Takes codes in portions of any size and writes whole buffers.
template <int bits> struct Packer {
  uint8_t* packed;
  int filled = 0;
  uint8_t codes[BUFFER] = {};

  uint8_t* next() { return codes + filled; }
  int room(int64_t wanted) const { return static_cast<int>(std::min<int64_t>(wanted, BUFFER - filled)); }
  void advance(int num) {
    filled += num;
    if (filled == BUFFER) flush();
  }
  void flush() {
    while (filled * bits % 8 != 0) codes[filled++] = 0;
    pack<bits>(codes, filled * bits / 8, packed);
    packed += filled * bits / 8;
    filled = 0;
  }
};

// Gives codes in portions of any size.
template <int bits> struct Unpacker {
  const uint8_t* packed;
  const uint8_t* end;
  int used = 0, filled = 0;
  uint8_t codes[BUFFER] = {};

  const uint8_t* next() const { return codes + used; }
  int room(int64_t wanted) {
    if (used == filled) {
      int num_bytes = static_cast<int>(std::min<int64_t>(BUFFER * bits / 8, end - packed));
      unpack<bits>(packed, num_bytes, codes);
      packed += num_bytes;
      filled = num_bytes * 8 / bits;
      used = 0;
    }
    return static_cast<int>(std::min<int64_t>(wanted, filled - used));
  }
  void advance(int num) { used += num; }
};

}  // namespace weft
