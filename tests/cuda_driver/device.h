// Memory of the device, its errors, and work distributed over the cores of the host.
#pragma once

#if __has_include("cuda_memory.h")
#include "cuda_memory.h"
#define EMULATED 1
#endif
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace driver {

// After one of these the device cannot be used any more.
struct CudaFailure : std::runtime_error {
    using runtime_error::runtime_error;
};
inline void check(cudaError_t error) {
    if (error != cudaSuccess) throw CudaFailure(std::string("CUDA: ") + cudaGetErrorString(error));
}
// Waits for a launch, so that its errors are attributed to it.
inline void finish(const char* error) {
    if (error != nullptr) throw CudaFailure(std::string("CUDA, not launched: ") + error);
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
}

// Whether the launches since the last call used clusters of this size, or no clusters (0). A GPU
// does not tell.
inline bool laid_out_over([[maybe_unused]] int cluster) {
#ifdef EMULATED
    return std::exchange(emulated::launches.cluster, 0u) == (unsigned)cluster;
#else
    return true;
#endif
}

// An allocation between guard bytes. Until it is written its bits are all ones, which is NaN.
class Memory {
  public:
    // 0 for compute-sanitizer, which then also sees reads outside an allocation.
    static inline size_t guard = 512;

    Memory(const char* name, size_t bytes) : name_(name), bytes_(bytes) {
        const size_t whole = (bytes + 15) / 16 * 16 + 2 * guard;  // vectors, as bulk copies read
        check(cudaMalloc(&start_, whole));
        check(cudaMemset(start_, kGuard, whole));
        poison();
        all().push_back(this);
    }
    ~Memory() {
        cudaFree(start_);
        std::erase(all(), this);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* data() const { return start_ + guard; }
    void poison() const { check(cudaMemset(data(), 0xff, bytes_)); }
    void upload(const void* from) { copy(data(), from, cudaMemcpyHostToDevice); }
    void download(void* to) const { copy(to, data(), cudaMemcpyDeviceToHost); }

    // Which allocation's guard bytes were written; empty if none.
    static std::string overrun() {
        std::vector<uint8_t> bytes(guard);
        for (const Memory* memory : all()) {
            for (const bool end : {false, true}) {
                const uint8_t* from = memory->start_ + (end ? guard + memory->bytes_ : 0);
                check(cudaMemcpy(bytes.data(), from, guard, cudaMemcpyDeviceToHost));
                for (size_t i = 0; i < guard; ++i) {
                    if (bytes[i] == kGuard) continue;
                    return std::to_string(end ? i : guard - i) + " bytes " +
                           (end ? "after " : "before ") + memory->name_;
                }
            }
        }
        return "";
    }

  private:
    static constexpr int kGuard = 0xa5;
    static std::vector<const Memory*>& all() {
        static std::vector<const Memory*> all;
        return all;
    }
    void copy(void* to, const void* from, cudaMemcpyKind kind) const {
        if (bytes_ > 0) check(cudaMemcpy(to, from, bytes_, kind));
    }

    const char* name_;
    size_t bytes_;
    uint8_t* start_;
};

template <typename T>
class Array : public Memory {
  public:
    Array(const char* name, int64_t count) : Memory(name, count * sizeof(T)), count_(count) {}
    T* data() const { return static_cast<T*>(Memory::data()); }
    std::vector<T> values() const {
        std::vector<T> to(count_);
        download(to.data());
        return to;
    }

  private:
    int64_t count_;
};

// What the host has as well.
template <typename T>
struct Input : Array<T> {
    std::vector<T> host;

    Input(const char* name, std::vector<T> values)
        : Array<T>(name, (int64_t)values.size()), host(std::move(values)) {
        upload();
    }
    // Of value(i).
    template <typename F>
    Input(const char* name, int64_t count, F value) : Array<T>(name, count), host(count) {
        for (int64_t i = 0; i < count; ++i) host[i] = (T)value(i);
        upload();
    }
    const T& operator[](int64_t i) const { return host[i]; }
    void upload() { Memory::upload(host.data()); }
};

// The time of work on the default stream.
template <typename Work>
float milliseconds(Work work) {
    cudaEvent_t start, end;
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&end));
    check(cudaEventRecord(start));
    work();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, start, end));
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    return ms;
}

// f(i) for i below count.
template <typename F>
void parallel(int64_t count, F f) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t i; (i = next++) < count;) f(i);
    };
    const int64_t cores = std::min<int64_t>(std::thread::hardware_concurrency(), count);
    std::vector<std::jthread> others;
    for (int64_t i = 1; i < cores; ++i) others.emplace_back(work);
    work();
}

// The i-th number of a sequence, uniform in [0, 2^64): the output of splitmix64.
inline uint64_t random_bits(uint64_t sequence, int64_t i) {
    uint64_t x = (sequence << 40) + (uint64_t)i * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
inline double uniform(uint64_t sequence, int64_t i, double low, double high) {
    return low + (high - low) * (double)(random_bits(sequence, i) >> 11) * 0x1p-53;
}

}  // namespace driver
