// What the programs of this folder share: numbers that host and card make alike, times by events, and errors against f64.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(call)                                                                                        \
    do {                                                                                                   \
        cudaError_t error = (call);                                                                        \
        if (error != cudaSuccess) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error));      \
            exit(1);                                                                                       \
        }                                                                                                  \
    } while (0)

// Uniform in -1 .. 1, of an index and a seed.
static inline __host__ __device__ float noise(uint64_t at, uint32_t seed) {
    uint64_t x = (at + 1) * 0x9e3779b97f4a7c15ull ^ (uint64_t)seed << 32;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    return (float)(int32_t)(x >> 32) * (1.0f / 2147483648.0f);
}

template <class T> T *device_memory(uint64_t n) {
    T *memory;
    CHECK(cudaMalloc(&memory, n * sizeof(T)));
    return memory;
}

template <class T> T *on_device(const std::vector<T> &values) {
    T *memory = device_memory<T>(values.size());
    CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <class T> std::vector<T> from_device(const T *memory, uint64_t n) {
    std::vector<T> values(n);
    CHECK(cudaMemcpy(values.data(), memory, n * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

// Median of `rounds` runs in microseconds, after three that do not count.
static inline double median_us(int rounds, const std::function<void(int)> &work) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times;
    for (int round = -3; round < rounds; round++) {
        CHECK(cudaEventRecord(begin));
        work(round + 3);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaGetLastError());
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (round >= 0)
            times.push_back(1000.0 * ms);
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return times[times.size() / 2];
}

// Sum of squared differences over the sum of squares.
struct Error {
    double wrong = 0.0, all = 0.0;
    void add(double actual, double expected) {
        wrong += (actual - expected) * (actual - expected);
        all += expected * expected;
    }
    double value() const { return wrong / all; }
};
