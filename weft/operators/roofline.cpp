// What this machine can do at most: bytes a second from each memory, operations a second, cycles a second.
// Every function gives the best of several rounds, as whatever else runs only ever makes a round slower.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>

namespace {

#if defined(__AVX512F__)
constexpr int vector_size = 64;
#elif defined(__AVX__)
constexpr int vector_size = 32;
#else
constexpr int vector_size = 16;
#endif

typedef float Floats __attribute__((vector_size(vector_size)));
typedef double Doubles __attribute__((vector_size(vector_size)));

constexpr int num_rounds = 40;  // short ones, so that some of them pass undisturbed on a busy machine
constexpr int64_t alignment = 4096;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T> void keep(T& value) { asm volatile("" : "+m"(value) : : "memory"); }

// Bytes counted: read 1 array, or read 2 and write 1.
void read_pass(const Floats* x, int64_t size) {
    Floats sums[8] = {};
    for (int64_t i = 0; i + 8 <= size; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += x[i + j];
    keep(sums);
}

void triad_pass(Floats* a, const Floats* b, const Floats* c, int64_t size) {
    for (int64_t i = 0; i < size; ++i) a[i] = b[i] + 3.0f * c[i];
    asm volatile("" : : "r"(a) : "memory");
}

Floats* allocate(int64_t size) {
    const int64_t bytes = (size * vector_size + alignment - 1) / alignment * alignment;
    Floats* memory = static_cast<Floats*>(std::aligned_alloc(alignment, bytes));
    for (int64_t i = 0; memory && i < size; ++i) memory[i] = Floats{} + 1.0f;
    return memory;
}

template <typename V> double multiply_add(int threads, int64_t repeats) {
    const double start = now();
#pragma omp parallel num_threads(threads)
    {
        V sums[12], factor = V{} + 0.5f, term = V{} + 1.0f;
        for (auto& sum : sums) sum = V{} + 1.0f;
        for (int64_t i = 0; i < repeats; ++i)
            for (auto& sum : sums) sum = sum * factor + term;
        keep(sums);
    }
    return now() - start;
}

template <typename V> double peak(int threads, double seconds, int flops_per_vector) {
    int64_t repeats = 1000;
    // Found with one thread: to wake the others may take longer than a whole round.
    while (multiply_add<V>(1, repeats) < seconds / num_rounds) repeats *= 2;
    double best = 0;
    for (int round = 0; round < num_rounds; ++round)
        best = std::max(best, 12.0 * repeats * flops_per_vector * threads / multiply_add<V>(threads, repeats));
    return best;
}

}  // namespace

extern "C" int vector_bytes() { return vector_size; }

// Bytes a second of all threads together; each works on `bytes` of its own. kind: 0 read, 1 triad. 0: no memory.
extern "C" double stream_rate(int kind, int64_t bytes, int threads, double seconds) {
    const int num_arrays = kind == 0 ? 1 : 3;
    const int64_t size = std::max<int64_t>(bytes / num_arrays / vector_size / 8 * 8, 8);
    double best = 0, start = 0;
    bool failed = false;
    int64_t repeats = 1;
#pragma omp parallel num_threads(threads)
    {
        Floats* arrays[3] = {};
        for (int i = 0; i < num_arrays; ++i) arrays[i] = allocate(size);
        if (!arrays[num_arrays - 1] || !arrays[0]) failed = true;
#pragma omp barrier
        for (int round = 0; !failed && round < num_rounds;) {
#pragma omp barrier
#pragma omp single
            start = now();
            for (int64_t i = 0; i < repeats; ++i)
                kind == 0 ? read_pass(arrays[0], size) : triad_pass(arrays[0], arrays[1], arrays[2], size);
#pragma omp barrier
            const double spent = now() - start;
            bool too_short = false;
#pragma omp barrier
#pragma omp single copyprivate(too_short)
            {
                too_short = spent < seconds / num_rounds / 2;
                if (too_short)
                    repeats *= 2;
                else
                    best = std::max(best, double(num_arrays) * size * vector_size * repeats * threads / spent);
            }
            round += !too_short;
        }
        for (auto* array : arrays) std::free(array);
    }
    return best;
}

extern "C" double peak_rate(int is_double, int threads, double seconds) {
    return is_double ? peak<Doubles>(threads, seconds, 2 * vector_size / 8)
                     : peak<Floats>(threads, seconds, 2 * vector_size / 4);
}

// Cycles a second: additions that wait for each other take one cycle each. 0: not known on this processor.
extern "C" double frequency(double seconds) {
    double best = 0;
    for (int round = 0; round < num_rounds; ++round) {
        int64_t count = 0;
        uint64_t x = 1, y = 3;
        const double start = now();
        double spent = 0;
        while (spent < seconds / num_rounds) {
            for (int i = 0; i < 1000; ++i) {
#if defined(__x86_64__)
                asm volatile("add %1, %0\n add %1, %0\n add %1, %0\n add %1, %0\n"
                             "add %1, %0\n add %1, %0\n add %1, %0\n add %1, %0\n"
                             : "+r"(x)
                             : "r"(y));
#elif defined(__aarch64__)
                asm volatile("add %0, %0, %1\n add %0, %0, %1\n add %0, %0, %1\n add %0, %0, %1\n"
                             "add %0, %0, %1\n add %0, %0, %1\n add %0, %0, %1\n add %0, %0, %1\n"
                             : "+r"(x)
                             : "r"(y));
#else
                return 0;
#endif
            }
            count += 8000;
            spent = now() - start;
        }
        best = std::max(best, count / spent);
    }
    return best;
}
