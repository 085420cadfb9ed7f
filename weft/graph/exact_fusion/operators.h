// ATen's element-wise operators, one function each, with the roundings of its kernels for processors with AVX2.
//
// Its compiler makes one instruction, with one rounding, of a product and a sum. Where it does is written out here, and
// this file is compiled without contraction, so nothing else is joined.
// GCC 12 takes -fma(a, b, c) for fma(-a, b, -c), which has another zero; so sums are written as sums, and a product's
// sign is given to the factor that is least often one itself.
// Roots are not here: ATen leaves them to MKL, which does not round them as the processor does.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#ifndef __FMA__
#error "the processor has no fused multiply-add"
#endif

namespace aten {

template <class T> inline T add(T a, T b, T alpha) { return alpha == T(1) ? a + b : std::fma(b, alpha, a); }
template <class T> inline T sub(T a, T b, T alpha) { return alpha == T(1) ? a - b : std::fma(b, -alpha, a); }
template <class T> inline T mul(T a, T b) { return a * b; }
template <class T> inline T div(T a, T b) { return a / b; }
template <class T> inline T neg(T a) { return -a; }
template <class T> inline T reciprocal(T a) { return T(1) / a; }
template <class T> inline T relu(T a) { return a < T(0) ? T(0) : a; }
template <class T> inline T threshold_backward(T grad, T x, T threshold) { return x <= threshold ? T(0) : grad; }
template <class T> inline T addcmul(T a, T b, T c, T value) {
  return value == T(-1) ? std::fma(b, -c, a) : std::fma(value * b, c, a);
}
template <class T> inline T addcdiv(T a, T b, T c, T value) { return a + value * b / c; }
template <class T> inline T lerp(T a, T b, T weight) {
  return std::fabs(weight) < T(0.5) ? std::fma(weight, b - a, a) : std::fma(-(b - a), T(1) - weight, b);
}

}  // namespace aten
