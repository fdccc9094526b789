// Memory of the device, its errors, and work distributed over the cores of the host.
#pragma once

#if __has_include("cuda_memory.h")
#include "cuda_memory.h"
#define EMULATED 1
#endif
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace driver {

// After an error the device cannot be used any more.
inline void check(cudaError_t error) {
    if (error) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}
// Waits for a launch, so that its errors are attributed to it.
inline void finish(const char* error) {
    if (error) throw std::runtime_error(std::string("CUDA, not launched: ") + error);
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

// An allocation between guard bytes. Its bits are all ones, which is NaN, unless the host gives
// others.
class Memory {
  public:
    // 0 for compute-sanitizer, which then also sees reads outside an allocation.
    static inline size_t guard = 512;

    Memory(const char* name, size_t bytes) : name_(name), bytes_(bytes) {
        const size_t whole = (bytes + 15) / 16 * 16 + 2 * guard;  // vectors, as bulk copies read
        check(cudaMalloc(&start_, whole));
        check(cudaMemset(start_, kGuard, whole));
        all.push_back(this);
    }
    ~Memory() {
        cudaFree(start_);
        std::erase(all, this);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    // What every allocation of a case holds before a launch.
    static void reset_all() {
        for (Memory* memory : all) memory->reset();
    }
    static std::vector<std::vector<uint8_t>> contents() {
        std::vector<std::vector<uint8_t>> of;
        for (const Memory* memory : all) of.push_back(memory->read<uint8_t>());
        return of;
    }
    // Which allocation's guard bytes were written; empty if none.
    static std::string overrun() {
        std::vector<uint8_t> bytes(guard);
        for (const Memory* memory : all) {
            for (const bool end : {false, true}) {
                const uint8_t* from = memory->start_ + (end ? guard + memory->bytes_ : 0);
                check(cudaMemcpy(bytes.data(), from, guard, cudaMemcpyDeviceToHost));
                const auto is_wrong = [](uint8_t byte) { return byte != kGuard; };
                const auto wrong = std::ranges::count_if(bytes, is_wrong);
                if (wrong == 0) continue;
                return std::to_string(wrong) + (end ? " after " : " before ") + memory->name_;
            }
        }
        return "";
    }

  protected:
    const void* given_ = nullptr;

    void* data() const { return start_ + guard; }
    void reset() {
        if (bytes_ == 0) return;
        check(given_ ? cudaMemcpy(data(), given_, bytes_, cudaMemcpyHostToDevice)
                     : cudaMemset(data(), 0xff, bytes_));
    }
    template <typename T>
    std::vector<T> read() const {
        std::vector<T> to(bytes_ / sizeof(T));
        if (bytes_ > 0) check(cudaMemcpy(to.data(), data(), bytes_, cudaMemcpyDeviceToHost));
        return to;
    }

  private:
    static constexpr int kGuard = 0xa5;
    static inline std::vector<Memory*> all;

    const char* name_;
    size_t bytes_;
    uint8_t* start_;
};

// An output, or an input, which the host has as well.
template <typename T>
struct Array final : Memory {
    std::vector<T> host;

    Array(const char* name, int64_t count) : Memory(name, count * sizeof(T)) { reset(); }
    Array(const char* name, std::vector<T> values)
        : Memory(name, values.size() * sizeof(T)), host(std::move(values)) {
        reset();
    }
    // Of value(i).
    template <typename F>
    Array(const char* name, int64_t count, F value) : Array(name, std::vector<T>(count)) {
        for (int64_t i = 0; i < count; ++i) host[i] = (T)value(i);
        reset();
    }
    T* data(int64_t i = 0) const { return static_cast<T*>(Memory::data()) + i; }
    T* data_if(bool given) const { return given ? data() : nullptr; }
    std::vector<T> values() const { return read<T>(); }
    const T& operator[](int64_t i) const { return host[i]; }
    void reset() {
        given_ = host.empty() ? nullptr : host.data();
        Memory::reset();
    }
};

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
