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
// gradient goes (null: nowhere; equal to logits: in place). Strides count elements.
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

// One entry a token, all contiguous. What the caller gave is float32; what kernels hand on to each
// other is double, so that nothing but the logits' own exp is rounded twice.
struct TokenInputs {
    const bool* live;
    const float* old_log_probs;
    const float* advantages;
    const double* weights;
    const float* is_weights;
    const float* ref_log_probs;
};

struct RowPassParams {
    LogitRows rows;
    const int64_t* labels;
    TokenInputs tokens;  // without advantages only the statistics are computed
    PolicyOptions options;
    const float* bounds;  // (lower, upper); null: anywhere between first and last
    Bounds first;
    Bounds last;
    double* log_probs;
    double* entropy;
    double* stats;       // (origin, sum) of every row, as the backend needs them to look again
    uint8_t* undecided;  // 1 where the gradient depends on where the bounds will be
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
    double* table;  // N at every point of the lower grid, then P at every point of the upper grid
};

struct TargetParams {
    double target;
    bool ratio;
    bool upper_first;
};

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
    const double* shares;  // P and N at the bounds, P and N at the start; null: of these tokens
    float* report;         // loss and metrics, in the order of output.py
    double* dlog_probs;
    double* dentropy;
};

}  // namespace bapo
