// Several labels per row, around passes that take one: the first pass gets the most probable label,
// and log-probs follow it; gradients of labels are computed before the second pass, which may
// overwrite the logits, and written after it. A warp takes a row.

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sampling_sets.h"

namespace bapo::cuda {

namespace {

constexpr int kRows = kRowsPerBlock, kThreads = kRows * kWarp;  // of a block

struct LabelGradient {
    int column;  // negative unless the label is the first of its row with this column
    float value;
};
static_assert(sizeof(LabelGradient) == sizeof(double));

// A row of logits or a set.
template <typename T>
struct LabelledRow {
    int64_t index;
    bool touched;  // false beyond the last row, and for a row without a set among sets
    const T* logits;
    T* grad;
    int64_t size;

    __device__ LabelledRow(const LogitRows& rows, const uint8_t* only = nullptr)
        : index((int64_t)blockIdx.x * kRows + threadIdx.x / kWarp) {
        touched = index < rows.count() && (only == nullptr || only[index]);
        if (!touched) return;
        LogitRows row = rows;
        if (rows.are_sets()) {
            const SetOfRow set = set_of(rows.sets, index);
            touched = !set.absent();
            row = row_of_set(rows, set);
        }
        logits = row.logits_at<T>(index);
        grad = row.grad_at<T>(index);
        size = row.vocab;
    }
    __device__ bool has(int64_t label) const { return label >= 0 && label < size; }
    __device__ Label label(int64_t column, const Transform& transform, Scales scales) const {
        const float z = to_float(logits[column]);
        return transform.softcapped ? label_of<true>((int)column, z, transform, scales)
                                    : label_of<false>((int)column, z, transform, scales);
    }
};
__device__ int own_lane() { return threadIdx.x % kWarp; }

template <typename T>
__global__ void __launch_bounds__(kThreads)
    leading_label_kernel(const __grid_constant__ RowPassParams params, int64_t* leading) {
    const LabelledRow<T> row(params.rows);
    if (!row.touched) return;
    const int64_t K = params.tokens.counted[row.index] ? params.labels_per_row : 0;
    int64_t best = kIgnoredLabel;
    float top = -kInf;
    for (int64_t k = own_lane(); k < K; k += kWarp) {
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

template <typename T>
__global__ void __launch_bounds__(kThreads)
    label_log_probs_kernel(const __grid_constant__ RowPassParams params, Scales scales) {
    const LabelledRow<T> row(params.rows);
    if (!row.touched) return;
    const bool counted = params.tokens.counted[row.index];
    const int64_t K = params.labels_per_row;
    const Transform transform = params.rows.transform.at_row(row.index);
    scales = scales_at(transform, scales);
    const auto origin = (float)params.stats[2 * row.index];
    const double sum = params.stats[2 * row.index + 1], log_sum = log(sum);
    for (int64_t k = own_lane(); k < K; k += kWarp) {
        const int64_t column = params.labels[row.index * K + k];
        double log_prob = 0.0;
        if (counted && row.has(column)) {
            const Label label = row.label(column, transform, scales);
            log_prob = label_log_prob(label, origin, log_sum, transform);
        } else if (counted && column != kIgnoredLabel) {
            // A row with a value that is NaN has no log-prob either.
            const bool in_set = params.rows.are_sets();
            log_prob = in_set ? log_prob_without_position(column) + (sum - sum) : (double)NAN;
        }
        params.log_probs[row.index * K + k] = log_prob;
    }
}

// `none` and `sums`: what the second pass takes as label and as gradient of its log-prob.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    label_gradients_kernel(const __grid_constant__ RowGradientParams params, Scales scales,
                           int64_t* none, double* sums, LabelGradient* gradients) {
    const LabelledRow<T> row(params.rows, params.only);
    if (!row.touched) return;
    const int64_t K = params.labels_per_row, first = row.index * K;
    const int64_t* const labels = params.labels + first;
    const double* const given = params.dlog_probs + first;
    const double bonus = params.dentropy ? -params.dentropy[row.index] : 0.0;
    double all = 0.0;
    bool some = bonus != 0.0;  // without any the row is zeros, and nothing of it is read
    for (int64_t k = 0; k < K; ++k) {
        all += given[k];
        some |= given[k] != 0.0;
    }
    if (own_lane() == 0) {
        none[row.index] = kIgnoredLabel;
        sums[row.index] = all;
    }
    const Transform transform = params.rows.transform.at_row(row.index);
    scales = scales_at(transform, scales);
    for (int64_t k = own_lane(); k < K; k += kWarp) {
        const int64_t column = labels[k];
        double own = 0.0;
        bool repeats = false;
        for (int64_t other = 0; other < K; ++other) {
            if (labels[other] != column) continue;
            own += given[other];
            repeats |= other < k;
        }
        gradients[first + k] = {-1, 0.0f};
        if (!some || repeats || !row.has(column)) continue;
        const Label label = row.label(column, transform, scales);
        const RowStatistics found = statistics_at(params, row.index, label, transform);
        const double dz = label_gradient(label.z, found.log_prob, found.entropy, label.slope,
                                         {own, bonus}, all - own);
        gradients[first + k] = {label.index, (float)dz};
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    write_labels_kernel(const __grid_constant__ RowGradientParams params,
                        const LabelGradient* gradients) {
    const LabelledRow<T> row(params.rows, params.only);
    if (!row.touched) return;
    const int64_t K = params.labels_per_row;
    for (int64_t k = own_lane(); k < K; k += kWarp) {
        const LabelGradient label = gradients[row.index * K + k];
        if (label.column >= 0) row.grad[label.column] = from_float<T>(label.value);
    }
}

}  // namespace

int64_t scratch_words(const RowPassParams& params) {
    return params.labels_per_row == 1 ? 0 : 2 * params.rows.count();
}
int64_t scratch_words(const RowGradientParams& params) {
    const int64_t K = params.labels_per_row;
    return K == 1 ? 0 : params.rows.count() * (2 + K);
}

const char* pass_of_labels(const RowPassParams& params, double* memory, void* stream) {
    const auto pass = params.rows.are_sets() ? sets_pass : row_pass;
    if (params.labels_per_row == 1) return pass(params, stream);
    RowPassParams first_label = params;
    auto* const leading = reinterpret_cast<int64_t*>(memory);
    first_label.labels = leading;
    first_label.log_probs = memory + params.rows.count();
    const char* error = over_rows([&]<typename T>() { return leading_label_kernel<T>; },
                                  params.rows, stream, params, leading);
    if (!error) error = pass(first_label, stream);
    if (error) return error;
    return over_rows([&]<typename T>() { return label_log_probs_kernel<T>; }, params.rows, stream,
                     params, scales_of(params.rows.transform));
}

const char* gradient_of_labels(const RowGradientParams& params, double* memory, void* stream) {
    const auto gradient = params.rows.are_sets() ? sets_gradient : row_gradient;
    if (params.labels_per_row == 1) return gradient(params, stream);
    RowGradientParams others_alone = params;
    auto* const none = reinterpret_cast<int64_t*>(memory);
    double* const sums = memory + params.rows.count();
    auto* const gradients = reinterpret_cast<LabelGradient*>(sums + params.rows.count());
    others_alone.labels = none;
    others_alone.dlog_probs = sums;
    const char* error =
        over_rows([&]<typename T>() { return label_gradients_kernel<T>; }, params.rows, stream,
                  params, scales_of(params.rows.transform), none, sums, gradients);
    if (!error) error = gradient(others_alone, stream);
    if (error) return error;
    return over_rows([&]<typename T>() { return write_labels_kernel<T>; }, params.rows, stream,
                     params, gradients);
}

}  // namespace bapo::cuda
