// Reductions of several ranks' elements in rank order, ((x0 + x1) + x2) + ..., one block in the first-level cache at a time.
//
// 16-bit floats are widened to 32 bits, reduced there and rounded once (to nearest even); a mean divides before that.
// The Python engine (fallback.py) gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace weft {

enum class Type : int32_t { f32, f64, bf16, f16, i8, u8, i16, i32, i64 };
enum class Reduction : int32_t { sum, mean, min, max, product };

struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

template <class T> inline T widen(T value) { return value; }
template <class T> inline void narrow(T value, T& out) { out = value; }

template <class To, class From> inline To bits_as(From value) {
    To out;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&out, &value, sizeof out);
    return out;
}

inline float widen(Bf16 value) { return bits_as<float>(uint32_t(value.bits) << 16); }

inline void narrow(float value, Bf16& out) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = value != value ? 0x7fc0 : uint16_t(rounded);
}

// Half precision through multiplications that are exact or round as wanted, so that the compiler can vectorise them.
inline float widen(F16 value) {
    const uint32_t word = uint32_t(value.bits) << 16, sign = word & 0x80000000u, twice = word + word;
    const float normal = bits_as<float>((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float denormal = bits_as<float>((twice >> 17) | (126u << 23)) - 0.5f;
    return bits_as<float>(sign | bits_as<uint32_t>(twice < (1u << 27) ? denormal : normal));
}

inline void narrow(float value, F16& out) {
    const uint32_t word = bits_as<uint32_t>(value), twice = word + word, sign = word & 0x80000000u;
    float base = (bits_as<float>(word & 0x7fffffffu) * 0x1.0p+112f) * 0x1.0p-110f;
    uint32_t bias = twice & 0xff000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    base = bits_as<float>((bias >> 1) + 0x07800000u) + base;
    const uint32_t bits = bits_as<uint32_t>(base), whole = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
    out.bits = uint16_t((sign >> 16) | (twice > 0xff000000u ? 0x7e00u : whole));
}

template <class T> using Wide = decltype(widen(T{}));

template <Reduction op, class W> inline W combine(W a, W b) {
    if constexpr (op == Reduction::product) return W(a * b);
    if constexpr (op == Reduction::min) return (a < b || a != a) ? a : b;  // not-a-number wins, as in torch
    if constexpr (op == Reduction::max) return (a > b || a != a) ? a : b;
    return W(a + b);
}

// A plain loop of vectors: the library's memcpy picks string instructions, which some processors run slowly.
inline void copy_bytes(char* target, const char* source, int64_t bytes) {
    typedef int64_t Vector __attribute__((vector_size(32), aligned(1), may_alias));
    int64_t at = 0;
    for (; at + 128 <= bytes; at += 128) {
        const Vector* from = reinterpret_cast<const Vector*>(source + at);
        Vector* to = reinterpret_cast<Vector*>(target + at);
        const Vector a = from[0], b = from[1], c = from[2], d = from[3];
        to[0] = a, to[1] = b, to[2] = c, to[3] = d;
    }
    if (at < bytes) std::memcpy(target + at, source + at, size_t(bytes - at));
}

constexpr int64_t kBlockBytes = 4096;

// targets[0..num_targets) may be among the sources: a block is read whole before it is written.
template <class T, Reduction op>
void reduce_blocks(const char* const* sources, int num_sources, char* const* targets, int num_targets, int64_t count) {
    using W = Wide<T>;
    constexpr int64_t block = kBlockBytes / int64_t(sizeof(W));
    alignas(64) W sum[block];
    for (int64_t begin = 0; begin < count; begin += block) {
        const int64_t n = count - begin < block ? count - begin : block;
        const T* first = reinterpret_cast<const T*>(sources[0]) + begin;
        if (num_sources == 1) {
            for (int64_t i = 0; i < n; i++) sum[i] = widen(first[i]);
        } else {
            const T* second = reinterpret_cast<const T*>(sources[1]) + begin;
            for (int64_t i = 0; i < n; i++) sum[i] = combine<op>(widen(first[i]), widen(second[i]));
        }
        for (int s = 2; s < num_sources; s++) {
            const T* other = reinterpret_cast<const T*>(sources[s]) + begin;
            for (int64_t i = 0; i < n; i++) sum[i] = combine<op>(sum[i], widen(other[i]));
        }
        if constexpr (op == Reduction::mean)
            for (int64_t i = 0; i < n; i++) sum[i] = W(sum[i] / W(num_sources));
        for (int t = 0; t < num_targets; t++) {
            T* out = reinterpret_cast<T*>(targets[t]) + begin;
            for (int64_t i = 0; i < n; i++) narrow(sum[i], out[i]);
        }
    }
}

template <class T>
void reduce_type(Reduction op, const char* const* sources, int num_sources, char* const* targets, int num_targets,
                 int64_t count) {
    switch (op) {
        case Reduction::sum: return reduce_blocks<T, Reduction::sum>(sources, num_sources, targets, num_targets, count);
        case Reduction::mean: return reduce_blocks<T, Reduction::mean>(sources, num_sources, targets, num_targets, count);
        case Reduction::min: return reduce_blocks<T, Reduction::min>(sources, num_sources, targets, num_targets, count);
        case Reduction::max: return reduce_blocks<T, Reduction::max>(sources, num_sources, targets, num_targets, count);
        case Reduction::product:
            return reduce_blocks<T, Reduction::product>(sources, num_sources, targets, num_targets, count);
    }
}

// Calls body with a value of the element type: the one place where types are listed.
template <class Body> void with_type(Type type, Body body) {
    switch (type) {
        case Type::f32: return body(float{});
        case Type::f64: return body(double{});
        case Type::bf16: return body(Bf16{});
        case Type::f16: return body(F16{});
        case Type::i8: return body(int8_t{});
        case Type::u8: return body(uint8_t{});
        case Type::i16: return body(int16_t{});
        case Type::i32: return body(int32_t{});
        case Type::i64: return body(int64_t{});
    }
}

inline void reduce(Type type, Reduction op, const char* const* sources, int num_sources, char* const* targets,
                   int num_targets, int64_t count) {
    with_type(type, [&](auto zero) {
        reduce_type<decltype(zero)>(op, sources, num_sources, targets, num_targets, count);
    });
}

// target = weights[0] sources[0] + weights[1] sources[1] + ..., in this order.
inline void reduce_weighted(Type type, const double* weights, const char* const* sources, int num_sources, char* target,
                            int64_t count) {
    with_type(type, [&](auto zero) {
        using T = decltype(zero);
        using W = Wide<T>;
        constexpr int64_t block = kBlockBytes / int64_t(sizeof(W));
        alignas(64) W sum[block];
        for (int64_t begin = 0; begin < count; begin += block) {
            const int64_t n = count - begin < block ? count - begin : block;
            for (int s = 0; s < num_sources; s++) {
                const T* source = reinterpret_cast<const T*>(sources[s]) + begin;
                const W weight = W(weights[s]);
                if (s == 0)
                    for (int64_t i = 0; i < n; i++) sum[i] = W(weight * widen(source[i]));
                else
                    for (int64_t i = 0; i < n; i++) sum[i] = W(sum[i] + W(weight * widen(source[i])));
            }
            T* out = reinterpret_cast<T*>(target) + begin;
            for (int64_t i = 0; i < n; i++) narrow(sum[i], out[i]);
        }
    });
}

}  // namespace weft
