// Words above a bound, and the word of a rank: what the selection of the largest is made of.
#pragma once

#include "words.h"

#if defined(__AVX512F__) && defined(__AVX512VL__)
#define WEFT_HAS_COMPRESS
#include <immintrin.h>
#endif

namespace weft {

#ifdef WEFT_HAS_COMPRESS
constexpr bool HAS_COMPRESS = true;
constexpr int RUN = 64;
#else
constexpr bool HAS_COMPRESS = false;
constexpr int RUN = 32;  // of which all are looked at if the largest is above the bound
#endif

// Appends what is above the bound to `words` (if they are kept) and `indices`, and returns how many there are then.
// Both need room for `num` more, whatever is found.
template <class T, bool has_words>
inline int64_t append_one_by_one(const T* kept, int64_t start, int num, word_of<T> bound, word_of<T>* words,
                                 int32_t* indices, int64_t found) {
  for (int j = 0; j < num; ++j) {
    word_of<T> word = magnitude<T>(kept[start + j]);
    if (has_words) words[found] = std::min(word, Word<T>::nan);
    indices[found] = static_cast<int32_t>(start + j);
    found += word > bound;
  }
  return found;
}

#ifdef WEFT_HAS_COMPRESS

// A vector is compared, what is above moves to its front, and all of it is stored: no branch depends on the data. In
// loops as above the same took twice the time. (To compress into memory is slow on some processors.)

template <bool has_words>
inline int append_vector(const float* kept, int64_t start, int32_t bound, int32_t* words, int32_t* indices) {
  __m512i word = _mm512_and_si512(_mm512_loadu_si512(kept + start), _mm512_set1_epi32(Word<float>::largest));
  __mmask16 is_above = _mm512_cmpgt_epi32_mask(word, _mm512_set1_epi32(bound));
  __m512i places = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(start)),
                                    _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  if (has_words) {
    word = _mm512_min_epi32(word, _mm512_set1_epi32(Word<float>::nan));
    _mm512_storeu_si512(words, _mm512_maskz_compress_epi32(is_above, word));
  }
  _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(is_above, places));
  return __builtin_popcount(is_above);
}

template <bool has_words>
inline int append_vector(const double* kept, int64_t start, int64_t bound, int64_t* words, int32_t* indices) {
  __m512i word = _mm512_and_si512(_mm512_loadu_si512(kept + start), _mm512_set1_epi64(Word<double>::largest));
  __mmask8 is_above = _mm512_cmpgt_epi64_mask(word, _mm512_set1_epi64(bound));
  __m256i places =
      _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(start)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
  if (has_words) {
    word = _mm512_min_epi64(word, _mm512_set1_epi64(Word<double>::nan));
    _mm512_storeu_si512(words, _mm512_maskz_compress_epi64(is_above, word));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices), _mm256_maskz_compress_epi32(is_above, places));
  return __builtin_popcount(is_above);
}

template <class T, bool has_words>
inline int64_t append_above(const T* kept, int64_t start, int num, word_of<T> bound, word_of<T>* words,
                            int32_t* indices, int64_t found) {
  constexpr int width = 64 / sizeof(T);
  int j = 0;
  for (; j + width <= num; j += width)
    found += append_vector<has_words>(kept, start + j, bound, has_words ? words + found : nullptr, indices + found);
  return append_one_by_one<T, has_words>(kept, start + j, num - j, bound, words, indices, found);
}

#else

template <class T, bool has_words>
inline int64_t append_above(const T* kept, int64_t start, int num, word_of<T> bound, word_of<T>* words,
                            int32_t* indices, int64_t found) {
  return append_one_by_one<T, has_words>(kept, start, num, bound, words, indices, found);
}

#endif

constexpr int NUM_BINS = 4096;

// The word that `rank` words (at least 1) reach. Bits of floats are close to logarithms, so that bins of equal width
// spread them well, whatever their distribution. `scratch` has room for all.
template <class W> inline W find_largest(const W* words, int64_t num, int64_t rank, W* scratch) {
  W low = words[0], high = words[0];
  for (int64_t i = 0; i < num; ++i) {
    low = std::min(low, words[i]);
    high = std::max(high, words[i]);
  }
  int shift = 0;
  while ((high - low) >> shift >= NUM_BINS) ++shift;
  uint32_t counts[NUM_BINS] = {};
  for (int64_t i = 0; i < num; ++i) ++counts[(words[i] - low) >> shift];
  W bin = NUM_BINS - 1;
  for (; counts[bin] < rank; --bin) rank -= counts[bin];
  if (shift == 0) return low + bin;
  int64_t found = 0;
  for (int64_t i = 0; i < num; ++i) {
    scratch[found] = words[i];
    found += (words[i] - low) >> shift == bin;
  }
  std::nth_element(scratch, scratch + rank - 1, scratch + found, [](W a, W b) { return a > b; });
  return scratch[rank - 1];
}

}  // namespace weft
