// What an operator in C++ sees: plain pointers and sizes, and nothing of PyTorch.
//
//     #include <weft/operator.h>
//
//     const char* forward(const weft::Tensor* in, weft::Tensor* out, const weft::Call* call);
//     const char* backward(const weft::Tensor* grads, const weft::Tensor* in, const weft::Tensor* out,
//                          weft::Tensor* in_grads, const weft::Call* call);
//
// Tensors stand in the order of the operator's arguments and results, numbers in call->attributes. Both functions
// return nullptr, or a text that says what is wrong. They keep nothing between calls and may be called by several
// threads at once. All tensors are contiguous unless the operator was made with contiguous=False.
#pragma once

#include <cstdint>

namespace weft {

enum class Type : int32_t { float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, boolean };

struct Tensor {
    void* data;              // nullptr in in_grads for an input without gradient, such as integers
    const int64_t* shape;    // rank sizes
    const int64_t* strides;  // rank strides, in elements
    int32_t rank;
    Type type;

    int64_t size() const {
        int64_t product = 1;
        for (int32_t i = 0; i < rank; ++i) product *= shape[i];
        return product;
    }
    template <typename T> T* as() const { return static_cast<T*>(data); }
};

// An argument that is no tensor: int, bool or float. Both fields hold it.
struct Attribute {
    int64_t integer;
    double real;
};

struct Call {
    const Attribute* attributes;
    void* stream;  // the current CUDA stream; nullptr on the CPU
};

// Calls f(T()) with T = float or double, as the type says.
template <typename F> const char* with_floating(Type type, F&& f) {
    if (type == Type::float32) return f(float()), nullptr;
    if (type == Type::float64) return f(double()), nullptr;
    return "type is neither float32 nor float64";
}

}  // namespace weft

extern "C" const char* forward(const weft::Tensor* in, weft::Tensor* out, const weft::Call* call);
extern "C" const char* backward(const weft::Tensor* grads, const weft::Tensor* in, const weft::Tensor* out,
                                weft::Tensor* in_grads, const weft::Call* call);
