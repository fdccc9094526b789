// Products with the rows of the head that sampling masks name, and their gradients. The rows of a
// set are read twice: for its logits, and for the gradient of the hidden state. L1 keeps between
// the two what fits, as shared memory, which is the same memory, would; the second time they are
// read backwards, so that the latest come first. Forwards, long sets would miss every time.

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sampling_set_row.cuh"

namespace bapo::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 6;  // of a multiprocessor, which leaves a thread 80 registers
constexpr int kAtOnce = 4;  // rows of the head by which a warp multiplies at once

template <typename T>
__device__ T* row_of(const Matrix& matrix, int64_t row) {
    return static_cast<T*>(matrix.data) + row * matrix.row_stride;
}

__device__ float warp_sum(float value) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, step);
    }
    return value;
}

// The values of a row's set, by the warps of a block. A vector of the hidden state, which stays in
// L1, is multiplied by those of kAtOnce rows, and the products of two vectors are added first.
template <typename T, bool kAligned>
__device__ void multiply(const SetHead& head, const Sets& sets, const Columns& columns,
                         const SetOfRow& set, int64_t row, float* values) {
    constexpr int n = kVec<T>;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int H = (int)head.hidden.columns;
    const T* const hidden = row_of<const T>(head.hidden, row);
    for (int64_t first = warp * kAtOnce; first < set.size; first += kWarps * kAtOnce) {
        const int64_t k = set.begin + first + lane;
        const bool mine = lane < kAtOnce && first + lane < set.size;
        const int64_t column = mine ? column_of(sets, columns, set, k) : kElsewhere;
        const T* rows[kAtOnce];
        float sums[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t of_row = __shfl_sync(kAllLanes, column, i);
            // Where there is none, the hidden state, which is there to be read.
            rows[i] = of_row >= 0 ? row_of<const T>(head.weight, of_row) : hidden;
        }
        // All vectors are loaded before the first is used.
        const auto add_products = [&](auto load) {
            uint4 raw[kAtOnce];
            float x[n];
            unpack(load(hidden), x, T{});
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) raw[i] = load(rows[i]);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                float w[n];
                unpack(raw[i], w, T{});
                float sum = x[0] * w[0];
#pragma unroll
                for (int j = 1; j < n; ++j) sum = fmaf(x[j], w[j], sum);
                sums[i] += sum;
            }
        };
        int h = lane * n;
        for (; h + n <= H; h += kWarp * n) {
            add_products([&](const T* from) { return load_vector<T, kAligned>(from + h); });
        }
        if (h < H) {
            add_products(
                [&](const T* from) { return load_elements<T, kAligned>(from, h, H, 0.0f); });
        }
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const float sum = warp_sum(sums[i]);
            if (lane == i) value = sum;
        }
        if (!mine) continue;
        if (head.bias && column >= 0) value += head.bias[column];
        values[k] = column >= 0 ? value : value_without_column(column);
    }
}

// Where a row of a matrix begins, and its factor in a sum.
struct alignas(16) Term {
    int64_t offset;
    float factor;
};
__device__ Term term_of(const Matrix& matrix, int64_t row, float factor) {
    return {row * matrix.row_stride, factor};
}

// The sum of factor*row over terms 0..count-1, in this order, in elements [h, h + n) of the rows,
// by each lane of a warp. Terms of 32 are added before they are added to the others. term(i) is
// called once; what has no factor is not read.
template <typename T, bool kAligned, typename F>
__device__ void sum_rows(const Matrix& rows, int64_t count, int h, F term,
                         float (&total)[kVec<T>]) {
    __shared__ Term terms_of_block[kWarps][kWarp];
    constexpr int n = kVec<T>;
    const int lane = threadIdx.x % kWarp, H = (int)rows.columns;
    const T* const data = static_cast<const T*>(rows.data);
    Term* const terms = terms_of_block[threadIdx.x / kWarp];
    for (int64_t first = 0; first < count; first += kWarp) {
        Term mine{0, 0.0f};
        if (first + lane < count) mine = term(first + lane);
        const bool has_factor = mine.factor != 0.0f;
        const uint32_t lanes = __ballot_sync(kAllLanes, has_factor);
        if (has_factor) shared_store(&terms[__popc(lanes & ((1u << lane) - 1))], mine);
        __syncwarp();
        float sum[n] = {};
        const int present = __popc(lanes);
        const auto add_terms = [&](auto load) {
#pragma unroll 4
            for (int i = 0; i < present; ++i) {
                const Term each = shared_load(&terms[i]);
                float x[n];
                unpack(load(data + each.offset), x, T{});
#pragma unroll
                for (int j = 0; j < n; ++j) sum[j] = fmaf(each.factor, x[j], sum[j]);
            }
        };
        if (h + n <= H) {
            add_terms([&](const T* from) { return load_vector<T, kAligned>(from + h); });
        } else if (h < H) {
            add_terms([&](const T* from) { return load_elements<T, kAligned>(from, h, H, 0.0f); });
        }
#pragma unroll
        for (int j = 0; j < n; ++j) total[j] += sum[j];
        __syncwarp();  // before the terms are overwritten
    }
}

// Writes elements, or adds them to what is there, with one rounding.
template <typename T, int n>
__device__ void store(const float (&values)[n], bool add, T* to, int count) {
    float sum[n];
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] = values[i];
    if constexpr (n % kVec<T> == 0) {
        if (count >= n && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
            for (int i = 0; i < n; i += kVec<T>) {
                auto* const vector = reinterpret_cast<uint4*>(to + i);
                float part[kVec<T>], before[kVec<T>] = {};
                if (add) unpack(*vector, before, T{});
#pragma unroll
                for (int j = 0; j < kVec<T>; ++j) part[j] = sum[i + j] + before[j];
                *vector = pack(part, T{});
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
        if (i < count) to[i] = from_float<T>(add ? to_float(to[i]) + sum[i] : sum[i]);
    }
}
template <int n>
__device__ void store(const float (&values)[n], bool add, const Matrix& to, int64_t row, int h) {
    const int count = (int)to.columns - h;
    switch (to.dtype) {
        case DType::kBFloat16: return store(values, add, row_of<__nv_bfloat16>(to, row) + h, count);
        case DType::kFloat16: return store(values, add, row_of<__half>(to, row) + h, count);
        default: return store(values, add, row_of<float>(to, row) + h, count);
    }
}

// The gradient of a row's hidden state, by the warps of a block.
template <typename T, bool kAligned>
__device__ void hidden_gradient(const Matrix& weight, const Sets& sets, const Columns& columns,
                                const SetOfRow& set, const float* dvalues, const Matrix& dhidden,
                                int64_t row) {
    constexpr int n = kVec<T>;
    const int H = (int)weight.columns, lane = threadIdx.x % kWarp;
    const auto term = [&](int64_t i) {
        const int64_t k = set.begin + set.size - 1 - i;
        const int64_t column = column_of(sets, columns, set, k);
        return column < 0 ? Term{0, 0.0f} : term_of(weight, column, dvalues[k]);
    };
    for (int first = (int)threadIdx.x / kWarp * kWarp * n; first < H; first += kThreads * n) {
        float total[n] = {};
        sum_rows<T, kAligned>(weight, set.size, first + lane * n, term, total);
        store(total, false, dhidden, row, first + lane * n);
    }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    multiply_sets_kernel(const __grid_constant__ MultiplySetsParams params) {
    const int64_t row = blockIdx.x;
    if (!params.counted[row]) return;
    const SetOfRow set = set_of(params.sets, row);
    multiply<T, kAligned>(params.head, params.sets, params.columns, set, row, params.values);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sets_dhidden_kernel(const __grid_constant__ SetHiddenGradientParams params) {
    const int64_t row = blockIdx.x;
    const SetOfRow set = set_of(params.sets, row);
    if (set.absent() || (params.only && !params.only[row])) return;
    hidden_gradient<T, kAligned>(params.weight, params.sets, params.columns, set, params.dvalues,
                                 params.dhidden, row);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    head_sets_pass_kernel(const __grid_constant__ HeadSetPassParams params, Scales scales) {
    const int64_t row = blockIdx.x;
    const RowPassParams& pass = params.pass;
    const Sets& sets = pass.rows.sets;
    const SetOfRow set = set_of(sets, row);
    const Columns columns{params.head.weight.rows, nullptr};
    float* const values = pass.rows.dvalues();
    if (pass.tokens.counted[row]) {
        multiply<T, kAligned>(params.head, sets, columns, set, row, values);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
        if (pass.rows.transform.softcapped) {
            pass_over_set<true>(pass, row, scales);
        } else {
            pass_over_set<false>(pass, row, scales);
        }
    }
    __syncthreads();
    if (set.absent() || pass.undecided[row]) return;
    hidden_gradient<T, kAligned>(params.head.weight, sets, columns, set, values, params.dhidden,
                                 row);
}

// A block takes a column and, of its row of the gradient, the elements of one slice.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sets_dweight_kernel(const __grid_constant__ SetWeightGradientParams params, int slices) {
    constexpr int n = kVec<T>;
    const int64_t column = blockIdx.x / slices;
    const int slice = blockIdx.x % slices, h = (slice * kThreads + (int)threadIdx.x) * n;
    const auto within = [&](int64_t i) { return i < 0 ? 0 : min(i, params.count); };
    const int64_t begin = within(params.segments[column]);
    const int64_t end = within(params.segments[column + 1]);
    if (params.add && begin >= end) return;

    float total[n] = {}, bias = 0.0f;
    const auto term = [&](int64_t i) {
        const int64_t k = params.order[begin + i], row = params.rows[begin + i];
        const bool inside = k >= 0 && k < params.count && row >= 0 && row < params.hidden.rows;
        const float factor = inside ? params.dvalues[k] : 0.0f;
        bias += factor;
        return inside ? term_of(params.hidden, row, factor) : Term{0, 0.0f};
    };
    sum_rows<T, kAligned>(params.hidden, end - begin, h, term, total);
    store(total, params.add, params.dweight, column, h);
    if (params.dbias && slice == 0 && threadIdx.x < kWarp) {
        const float sum = warp_sum(bias);
        if (threadIdx.x == 0) params.dbias[column] += sum;
    }
}

// Whether every row starts at a multiple of 16 bytes.
bool aligned(const Matrix& matrix) {
    const uint64_t size = matrix.dtype == DType::kFloat32 ? 4 : 2;
    uint64_t starts = reinterpret_cast<uintptr_t>(matrix.data);
    if (matrix.rows > 1) starts |= matrix.row_stride * size;
    return starts % 16 == 0;
}

// Calls f.operator()<T, kAligned>() for rows that are read from these.
template <typename F, typename... Matrices>
auto with_rows(F f, const Matrix& matrix, const Matrices&... more) {
    const bool all = (aligned(matrix) && ... && aligned(more));
    return with_dtype(matrix.dtype, [&]<typename T>() {
        return all ? f.template operator()<T, true>() : f.template operator()<T, false>();
    });
}

}  // namespace

const char* multiply_sets(const MultiplySetsParams& params, void* stream) {
    const auto run = [&]<typename T, bool kAligned>() {
        return launch(multiply_sets_kernel<T, kAligned>, params.sets.rows, kThreads, stream,
                      params);
    };
    return with_rows(run, params.head.hidden, params.head.weight);
}

const char* head_sets_pass(const HeadSetPassParams& params, void* stream) {
    const Scales scales = scales_of(params.pass.rows.transform);
    const auto run = [&]<typename T, bool kAligned>() {
        return launch(head_sets_pass_kernel<T, kAligned>, params.pass.rows.rows, kThreads, stream,
                      params, scales);
    };
    return with_rows(run, params.head.hidden, params.head.weight);
}

const char* sets_dhidden(const SetHiddenGradientParams& params, void* stream) {
    const auto run = [&]<typename T, bool kAligned>() {
        return launch(sets_dhidden_kernel<T, kAligned>, params.sets.rows, kThreads, stream, params);
    };
    return with_rows(run, params.weight);
}

const char* sets_dweight(const SetWeightGradientParams& params, void* stream) {
    const auto run = [&]<typename T, bool kAligned>() {
        constexpr int kSlice = kThreads * kVec<T>;
        const int slices = std::max<int>(1, (params.hidden.columns + kSlice - 1) / kSlice);
        return launch(sets_dweight_kernel<T, kAligned>, params.dweight.rows * slices, kThreads,
                      stream, params, slices);
    };
    return with_rows(run, params.hidden);
}

}  // namespace bapo::cuda
