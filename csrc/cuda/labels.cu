// Several labels per row, around the passes over rows or sets, which take one: before the first
// pass the most probable label is found, which that leaves out of its sums, and after it the
// log-probs of all are; before the second pass the gradients of the labels are computed, from
// logits that it may overwrite, and after it they are written. A warp takes a row.

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sampling_sets.h"

namespace bapo::cuda {

namespace {

constexpr int kRows = 8, kThreads = kRows * kWarp;  // of a block
constexpr int kAtOnce = 4;  // labels of a lane that it looks for among the others

// A label's gradient, where it is the first of the labels of its row with this column; otherwise
// the column is negative.
struct LabelGradient {
    int column;
    float value;
};

// A row of logits, or a set.
template <typename T>
struct LabelledRow {
    int64_t index;
    const T* logits;
    T* grad;
    int64_t size;
    bool touched;  // there is such a row, and it is of this kind
    bool counted;

    __device__ LabelledRow(const LogitRows& rows, const bool* counted_rows, const uint8_t* only)
        : index((int64_t)blockIdx.x * kRows + threadIdx.x / kWarp) {
        touched = index < rows.count() && (only == nullptr || only[index]);
        if (!touched) return;
        counted = counted_rows == nullptr || counted_rows[index];
        if (rows.are_sets()) {
            const SetOfRow set = set_of(rows.sets, index);
            touched = !set.absent();
            logits = static_cast<const T*>(rows.logits) + set.begin;
            grad = static_cast<T*>(rows.grad) + set.begin;
            size = set.size;
        } else {
            logits = rows.logits_at<T>(index);
            grad = rows.grad_at<T>(index);
            size = rows.vocab;
        }
    }
    __device__ bool has(int64_t label) const { return label >= 0 && label < size; }
};
__device__ int own_lane() { return threadIdx.x % kWarp; }

template <typename T>
__global__ void __launch_bounds__(kThreads)
    leading_label_kernel(const __grid_constant__ RowPassParams params, int64_t* leading) {
    const LabelledRow<T> row(params.rows, params.tokens.counted, nullptr);
    if (!row.touched) return;
    const int64_t K = params.labels_per_row;
    int64_t best = kIgnoredLabel;
    float top = -kInf;
    for (int64_t k = own_lane(); k < K && row.counted; k += kWarp) {
        const int64_t label = params.labels[row.index * K + k];
        const float z = row.has(label) ? to_float(row.logits[label]) : NAN;
        if (z > top) top = z, best = label;
    }
    // Any of several is as good, but it must always be the same one.
    const float most = warp_max(top);
    const uint32_t with_most = __ballot_sync(kAllLanes, top == most);
    best = __shfl_sync(kAllLanes, best, __ffs(with_most) - 1);
    if (own_lane() == 0) leading[row.index] = best;
}

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(kThreads)
    label_log_probs_kernel(const __grid_constant__ RowPassParams params, Scales scales) {
    const LabelledRow<T> row(params.rows, params.tokens.counted, nullptr);
    if (!row.touched) return;
    const int64_t K = params.labels_per_row;
    const Transform transform = params.rows.transform.of_row(row.index);
    scales = scales_at(transform, scales);
    const auto origin = (float)params.stats[2 * row.index];
    const double sum = params.stats[2 * row.index + 1], log_sum = log(sum);
    for (int64_t k = own_lane(); k < K; k += kWarp) {
        const int64_t label = params.labels[row.index * K + k];
        double log_prob = 0.0;
        if (row.counted && row.has(label)) {
            const float y = transformed<kSoftcap>(to_float(row.logits[label]), scales);
            log_prob = ((double)y - origin) * transform.scale - log_sum;
        } else if (row.counted && label != kIgnoredLabel) {
            // A row with a value that is NaN has no log-prob either.
            const bool in_set = params.rows.are_sets();
            log_prob = in_set ? log_prob_without_position(label) + (sum - sum) : (double)NAN;
        }
        params.log_probs[row.index * K + k] = log_prob;
    }
}

template <typename T, bool kSoftcap>
__global__ void __launch_bounds__(kThreads)
    label_gradients_kernel(const __grid_constant__ RowGradientParams params, Scales scales,
                           int64_t* none, double* sums, LabelGradient* gradients) {
    const LabelledRow<T> row(params.rows, nullptr, params.only);
    if (!row.touched) return;
    const int64_t K = params.labels_per_row, first = row.index * K;
    const int64_t* const labels = params.labels + first;
    const double* const given = params.dlog_probs + first;
    const double bonus = params.dentropy ? -params.dentropy[row.index] : 0.0;
    double all = 0.0;
    bool some = bonus != 0.0;
    for (int64_t k = own_lane(); k < K; k += kWarp) {
        all += given[k];
        some |= given[k] != 0.0;
    }
    // Without any the row is zeros, and nothing of it is read.
    some = __ballot_sync(kAllLanes, some) != 0;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) all += __shfl_xor_sync(kAllLanes, all, step);
    if (own_lane() == 0) {
        none[row.index] = kIgnoredLabel;
        sums[row.index] = all;
    }
    const Transform transform = params.rows.transform.of_row(row.index);
    scales = scales_at(transform, scales);
    const auto origin = (float)params.stats[2 * row.index];
    const double log_sum = log(params.stats[2 * row.index + 1]);
    const double entropy = params.entropy[row.index];
    for (int64_t begin = own_lane(); begin < K; begin += kAtOnce * kWarp) {
        int64_t mine[kAtOnce];
        double own[kAtOnce] = {};
        bool repeats[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t k = begin + i * kWarp;
            mine[i] = k < K ? labels[k] : kIgnoredLabel;
        }
        for (int64_t other = 0; other < K; ++other) {
            const int64_t label = labels[other];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (label != mine[i]) continue;
                own[i] += given[other];
                repeats[i] |= other < begin + i * kWarp;
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t k = begin + i * kWarp;
            if (k >= K) break;
            if (!some || !row.has(mine[i]) || repeats[i]) {
                gradients[first + k] = {-1, 0.0f};
                continue;
            }
            const auto index = (int)mine[i];
            const float z = to_float(row.logits[index]);
            const Label label = label_of<kSoftcap>(index, z, transform, scales);
            const double log_p = label_log_prob(label, origin, log_sum, transform);
            const double dz =
                label_gradient(z, log_p, entropy, label.slope, {own[i], bonus}, all - own[i]);
            gradients[first + k] = {index, (float)dz};
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    write_labels_kernel(const __grid_constant__ RowGradientParams params,
                        const LabelGradient* gradients) {
    const LabelledRow<T> row(params.rows, nullptr, params.only);
    if (!row.touched) return;
    const int64_t K = params.labels_per_row;
    for (int64_t k = own_lane(); k < K; k += kWarp) {
        const LabelGradient label = gradients[row.index * K + k];
        if (label.column >= 0) row.grad[label.column] = from_float<T>(label.value);
    }
}

// Calls f.operator()<T, kSoftcap>() with the number of blocks.
template <typename F>
const char* with_blocks(const LogitRows& rows, F f) {
    const int64_t blocks = (rows.count() + kRows - 1) / kRows;
    return with_dtype(rows.dtype, [&]<typename T>() {
        return rows.transform.softcapped ? f.template operator()<T, true>(blocks)
                                         : f.template operator()<T, false>(blocks);
    });
}

}  // namespace

int64_t label_words(const RowPassParams& params) { return 2 * params.rows.count(); }

const char* pass_of_labels(const RowPassParams& params, double* memory, void* stream) {
    RowPassParams of_leading = params;
    auto* const leading = reinterpret_cast<int64_t*>(memory);
    of_leading.labels = leading;
    of_leading.labels_per_row = 1;
    of_leading.log_probs = memory + params.rows.count();
    const char* error = with_blocks(params.rows, [&]<typename T, bool kSoftcap>(int64_t blocks) {
        return launch(leading_label_kernel<T>, blocks, kThreads, stream, params, leading);
    });
    if (error) return error;
    error = params.rows.are_sets() ? sets_pass(of_leading, stream) : row_pass(of_leading, stream);
    if (error) return error;
    return with_blocks(params.rows, [&]<typename T, bool kSoftcap>(int64_t blocks) {
        return launch(label_log_probs_kernel<T, kSoftcap>, blocks, kThreads, stream, params,
                      scales_of(params.rows.transform));
    });
}

int64_t label_words(const RowGradientParams& params) {
    static_assert(sizeof(LabelGradient) == sizeof(double));
    return params.rows.count() * (2 + params.labels_per_row);
}

const char* gradient_of_labels(const RowGradientParams& params, double* memory, void* stream) {
    const int64_t N = params.rows.count();
    auto* const none = reinterpret_cast<int64_t*>(memory);
    double* const sums = memory + N;
    auto* const gradients = reinterpret_cast<LabelGradient*>(memory + 2 * N);
    RowGradientParams of_others = params;
    of_others.labels = none;
    of_others.labels_per_row = 1;
    of_others.dlog_probs = sums;
    const char* error = with_blocks(params.rows, [&]<typename T, bool kSoftcap>(int64_t blocks) {
        return launch(label_gradients_kernel<T, kSoftcap>, blocks, kThreads, stream, params,
                      scales_of(params.rows.transform), none, sums, gradients);
    });
    if (error) return error;
    error =
        params.rows.are_sets() ? sets_gradient(of_others, stream) : row_gradient(of_others, stream);
    if (error) return error;
    return with_blocks(params.rows, [&]<typename T, bool kSoftcap>(int64_t blocks) {
        return launch(write_labels_kernel<T>, blocks, kThreads, stream, params, gradients);
    });
}

}  // namespace bapo::cuda
