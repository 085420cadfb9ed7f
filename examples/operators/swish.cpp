// x * sigmoid(beta * x), and its gradient.
#include <cmath>

#include <weft/operator.h>

const char* forward(const weft::Tensor* in, weft::Tensor* out, const weft::Call* call) {
    const double beta = call->attributes[0].real;
    return weft::with_floating(in[0].type, [&](auto zero) {
        using T = decltype(zero);
        const T* x = in[0].as<T>();
        T* y = out[0].as<T>();
        const int64_t size = in[0].size();
#pragma omp parallel for if (size > 10000)
        for (int64_t i = 0; i < size; ++i) y[i] = x[i] / (T(1) + std::exp(-T(beta) * x[i]));
    });
}

const char* backward(const weft::Tensor* grads, const weft::Tensor* in, const weft::Tensor* out,
                     weft::Tensor* in_grads, const weft::Call* call) {
    const double beta = call->attributes[0].real;
    return weft::with_floating(in[0].type, [&](auto zero) {
        using T = decltype(zero);
        const T *g = grads[0].as<T>(), *x = in[0].as<T>(), *y = out[0].as<T>();
        T* gx = in_grads[0].as<T>();
        const int64_t size = in[0].size();
#pragma omp parallel for if (size > 10000)
        for (int64_t i = 0; i < size; ++i) {
            const T s = T(1) / (T(1) + std::exp(-T(beta) * x[i]));
            gx[i] = g[i] * (s + T(beta) * y[i] * (T(1) - s));
        }
    });
}
