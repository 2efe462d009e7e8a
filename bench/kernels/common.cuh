// What the programs in this folder share: buffers of random numbers, a timer, and the error against plain f64.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#define CHECK(call)                                                                            \
    do {                                                                                       \
        cudaError_t status = (call);                                                           \
        if (status != cudaSuccess) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status)); \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (0)

template <class T> struct DeviceBuffer {
    T *at = nullptr;
    size_t n;
    explicit DeviceBuffer(size_t n) : n(n) { CHECK(cudaMalloc(&at, n * sizeof(T))); }
    explicit DeviceBuffer(const std::vector<T> &values) : DeviceBuffer(values.size()) {
        CHECK(cudaMemcpy(at, values.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    DeviceBuffer(const DeviceBuffer &) = delete;
    ~DeviceBuffer() { cudaFree(at); }
    std::vector<T> values() const {
        std::vector<T> values(n);
        CHECK(cudaMemcpy(values.data(), at, n * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
};

inline std::vector<float> random_floats(size_t n, float scale, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(n);
    for (float &value : values)
        value = normal(generator);
    return values;
}

inline std::vector<uint8_t> random_bytes(size_t n, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<uint8_t> values(n);
    for (uint8_t &value : values)
        value = (uint8_t)generator();
    return values;
}

// Median seconds of a run, each timed by events.
inline double median_seconds(const std::function<void(int)> &run, int runs = 20) {
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> milliseconds(runs);
    for (int at = -3; at < runs; at++) {
        CHECK(cudaEventRecord(start));
        run(at + 3);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaGetLastError());
        if (at >= 0)
            CHECK(cudaEventElapsedTime(&milliseconds[at], start, end));
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    return milliseconds[runs / 2] * 1e-3;
}

// Sum of squared differences over the sum of squares.
struct SquaredError {
    double wrong = 0, all = 0;
    void add(double actual, double expected) {
        wrong += (actual - expected) * (actual - expected);
        all += expected * expected;
    }
    double normalised() const { return wrong / all; }
};
