// Adding to what is kept, and the places of the largest in the same pass.
//
//   sample -> bound, a little below the wanted quantile
//   kept   -> [a run of 64: add] -> those above the bound become candidates
//   candidates full -> the `num` best stay, and the bound is the least of them: a later one must be above it
//   end    -> the `num` best; if there are not as many, once more without a bound
#pragma once

#include "above.h"

namespace weft {

template <class T> struct Nothing {
  T* kept;
  T peek(int64_t i) const { return kept[i]; }
  T apply(int64_t i) const { return kept[i]; }
};

template <class T> struct Plain {
  T* kept;
  const T* message;
  T scale;
  T peek(int64_t i) const { return kept[i] + scale * message[i]; }
  T apply(int64_t i) const { return kept[i] = peek(i); }
};

template <class T, bool nesterov> struct WithMomentum {
  T* kept;
  const T* message;
  T scale;
  T* velocity;
  T momentum;
  T peek(int64_t i) const {
    T gradient = scale * message[i];
    if (nesterov) return kept[i] + (momentum * (velocity[i] + gradient) + gradient);
    return kept[i] + (momentum * velocity[i] + gradient);
  }
  T apply(int64_t i) const {
    T gradient = scale * message[i], fresh;
    if (nesterov) {
      fresh = momentum * (velocity[i] + gradient);
      kept[i] = kept[i] + (fresh + gradient);
    } else {
      fresh = momentum * velocity[i] + gradient;
      kept[i] = kept[i] + fresh;
    }
    velocity[i] = fresh;
    return kept[i];
  }
};

template <class T, class Function>
inline auto with_update(T* kept, const T* message, T scale, T* velocity, T momentum, int nesterov, Function call) {
  if (message == nullptr) return call(Nothing<T>{kept});
  if (velocity == nullptr) return call(Plain<T>{kept, message, scale});
  if (nesterov) return call(WithMomentum<T, true>{kept, message, scale, velocity, momentum});
  return call(WithMomentum<T, false>{kept, message, scale, velocity, momentum});
}

template <class Update> inline void apply_all(Update update, int64_t num) {
#pragma GCC ivdep
  for (int64_t i = 0; i < num; ++i) update.apply(i);
}

// Applies the update to a run. False: nothing in it is above the bound, as far as that is known for free.
template <class T, class Update> inline bool apply_run(Update update, int64_t start, int num, word_of<T> bound) {
  word_of<T> largest = HAS_COMPRESS ? Word<T>::largest : 0;
#pragma GCC ivdep
  for (int j = 0; j < num; ++j) {
    word_of<T> word = magnitude<T>(update.apply(start + j));
    if (!HAS_COMPRESS) largest = std::max(largest, word);
  }
  return largest > bound;
}

// Calls handle(start, num) for all runs that may have something above bound(), behind the update.
template <class T, class Update, class Bound, class Function>
inline void for_runs(Update update, int64_t num_elements, Bound bound, Function handle) {
  int64_t start = 0;
  for (; start + RUN <= num_elements; start += RUN)
    if (apply_run<T>(update, start, RUN, bound())) handle(start, RUN);
  int num = static_cast<int>(num_elements - start);
  apply_run<T>(update, start, num, bound());
  handle(start, num);
}

template <class T, class Update>
inline int64_t select_above(Update update, int64_t num_elements, word_of<T> bound, int32_t* indices) {
  int64_t found = 0;
  for_runs<T>(update, num_elements, [=] { return bound; }, [&](int64_t start, int num) {
    found = append_above<T, false>(update.kept, start, num, bound, nullptr, indices, found);
  });
  return found;
}

// Elements above a bound, in order of their places, never more than `capacity`.
template <class T> struct Candidates {
  using W = word_of<T>;
  W* words;
  W* scratch;
  int32_t* indices;
  int64_t capacity, wanted, found = 0;
  W bound;  // a candidate is above it

  void add_run(const T* kept, int64_t start, int num) {
    if (found + num > capacity) keep_best();
    found = append_above<T, true>(kept, start, num, bound, words, indices, found);
  }

  // The `wanted` best, of equals the first.
  void keep_best() {
    if (found <= wanted) return;
    W least = find_largest(words, found, wanted, scratch);
    int64_t above = 0, left = 0;
    for (int64_t i = 0; i < found; ++i) above += words[i] > least;
    int64_t ties = wanted - above;
    for (int64_t i = 0; i < found; ++i) {
      W word = words[i];
      bool is_tie = word == least;
      words[left] = word;
      indices[left] = indices[i];
      left += (word > least) | (is_tie & (ties > 0));
      ties -= is_tie;
    }
    found = left;
    bound = least == Word<T>::nan ? Word<T>::largest : least;
  }
};

constexpr int64_t NUM_SAMPLES = 1 << 16;
constexpr int64_t SAMPLE_RUN = 16;

// A bound that, most likely, a few more than `wanted` elements are above. `sample` has room for twice NUM_SAMPLES.
template <class T, class Update>
inline word_of<T> guess_bound(Update update, int64_t num_elements, int64_t wanted, word_of<T>* sample) {
  int64_t runs = std::min(NUM_SAMPLES, num_elements / 8) / SAMPLE_RUN;
  int64_t places = num_elements / SAMPLE_RUN;
  if (runs < 64) return -1;
  for (int64_t run = 0; run < runs; ++run) {
    // One run from each of equal parts: where in it is by chance, lest the rows of a matrix keep step.
    int64_t jitter = (static_cast<int64_t>(mix(static_cast<uint32_t>(run), 1, 2)) * places) >> 32;
    int64_t start = (run * places + jitter) / runs * SAMPLE_RUN;
    for (int j = 0; j < SAMPLE_RUN; ++j)
      sample[run * SAMPLE_RUN + j] = std::min(magnitude<T>(update.peek(start + j)), Word<T>::nan);
  }
  int64_t num = runs * SAMPLE_RUN;
  double rank = static_cast<double>(wanted) * num / num_elements;
  int64_t safe = static_cast<int64_t>(rank + 4 * std::sqrt(rank) + 16);
  if (safe >= num) return -1;
  return find_largest(sample, num, safe + 1, sample + NUM_SAMPLES) - 1;
}

template <class T, class Update>
inline void collect(Update update, int64_t num_elements, Candidates<T>& candidates) {
  for_runs<T>(update, num_elements, [&] { return candidates.bound; }, [&](int64_t start, int num) {
    candidates.add_run(update.kept, start, num);
  });
  candidates.keep_best();
}

// `words` and `scratch` have room for `capacity`, which is at least wanted + RUN, and `scratch` for twice
// NUM_SAMPLES too.
template <class T, class Update>
inline void select_largest(Update update, int64_t num_elements, Candidates<T> candidates, int32_t* chosen) {
  candidates.bound = guess_bound<T>(update, num_elements, candidates.wanted, candidates.scratch);
  collect(update, num_elements, candidates);
  if (candidates.found < candidates.wanted) {
    candidates.found = 0;
    candidates.bound = -1;
    collect(Nothing<T>{update.kept}, num_elements, candidates);
  }
  std::copy(candidates.indices, candidates.indices + candidates.wanted, chosen);
}

}  // namespace weft
