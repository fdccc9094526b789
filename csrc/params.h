// Plain descriptions of a launch, by value; no torch. Optional pointers are null.
#pragma once

#include <cstdint>

#include "policy_math.h"

namespace bapo {

enum class DType : int64_t { kFloat32, kBFloat16, kFloat16 };

// x = scale*y with y = z, or y = tanh(logit_scale*z/softcap); dx/dz = slope, times 1 - y^2 under
// softcap.
struct Transform {
    bool softcapped;
    double logit_scale;
    double softcap;
    double scale;
    double slope;
};

// Rows of logits [batches, rows, vocab] with unit stride in the last dimension, and where their
// gradient is written (null: it is not computed; equal to logits: in place). Strides count
// elements.
struct LogitRows {
    DType dtype;
    int64_t batches;
    int64_t rows;
    int64_t vocab;
    const void* logits;
    int64_t batch_stride;
    int64_t row_stride;
    void* grad;
    int64_t grad_batch_stride;
    int64_t grad_row_stride;
    Transform transform;

    BAPO_HD int64_t count() const { return batches * rows; }
};

// One entry per token, all contiguous. Inputs of the caller are float32; values passed from kernel
// to kernel are double, so that only the exp of the logits is rounded to float32.
struct TokenInputs {
    const bool* counted;
    const float* old_log_probs;
    const float* advantages;
    const double* weights;
    const float* is_weights;
    const float* ref_log_probs;
};

// Without rows.grad this is row_statistics: the first pass alone, for which counted is the only
// input per token beside the label, and undecided is null.
struct RowPassParams {
    LogitRows rows;
    const int64_t* labels;
    TokenInputs tokens;
    PolicyOptions options;
    const float* bounds;  // (lower, upper); null: not known yet, between first and last
    Bounds first;
    Bounds last;
    double* log_probs;
    double* entropy;
    double* stats;       // (origin, sum) of every row, which the second pass of this backend needs
    uint8_t* undecided;  // 1 where the gradient depends on the bounds that the search will find
};

struct RowGradientParams {
    LogitRows rows;
    const int64_t* labels;
    const double* stats;
    const double* entropy;
    const double* dlog_probs;
    const double* dentropy;
    const uint8_t* only;  // rows to write; null: all
};

struct ContributionParams {
    int64_t count;
    const double* log_probs;
    TokenInputs tokens;
    const float* rollout_log_probs;
    Grid lower;
    Grid upper;
    bool uniform_weight;
    bool gradient;
    // Negative mass at every point of the lower grid, then positive mass at every point of the
    // upper grid.
    double* table;
};

struct TargetParams {
    double target;
    bool ratio;
    bool upper_first;
};

// What a loss reports, in the order of output.py.
struct Report {
    float loss;
    float pg_loss;
    float pg_clipfrac;
    float pg_clipfrac_lower;
    float ppo_kl;
    float entropy;
    float kl_loss;
    float bapo_clip_low;
    float bapo_clip_high;
    float bapo_pos_share;
    float bapo_pos_share_start;
    float bapo_pos_neg_ratio;
    float bapo_saturated;
    float live_tokens;
};
constexpr int kReportSize = sizeof(Report) / sizeof(float);

struct PolicyParams {
    int64_t count;
    const double* log_probs;
    const double* entropy;
    TokenInputs tokens;
    const float* rollout_log_probs;
    PolicyOptions options;
    bool uniform_weight;
    bool gradient;
    Bounds first;
    TargetParams target;
    const float* bounds;
    // Positive and negative mass at the final bounds, then at the starting bounds; null: those of
    // these tokens.
    const double* masses;
    Report* report;
    double* dlog_probs;
    double* dentropy;
};

}  // namespace bapo
