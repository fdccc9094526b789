// Plain descriptions of a launch, by value; no torch. Optional pointers are null.
#pragma once

#include <cstdint>

#include "policy_math.h"

namespace bapo {

enum class DType : int64_t { kFloat32, kBFloat16, kFloat16 };

// x = scale*y with y = z, or y = tanh(logit_scale*z/softcap); dx/dz = slope, times 1 - y^2 under
// softcap. Where every row has a temperature of its own, scale and slope are those at
// temperature 1.
struct Transform {
    bool softcapped;
    double logit_scale;
    double softcap;
    double scale;
    double slope;
    const float* temperatures;  // one per row; null: one for all, which scale and slope contain

    BAPO_HD Transform at(float temperature) const {
        Transform of_row = *this;
        if (temperatures == nullptr) return of_row;
        // Any other would still give numbers.
        const double by = temperature > 0.0f && temperature < INFINITY ? temperature : NAN;
        of_row.scale /= by;
        of_row.slope /= by;
        return of_row;
    }
    BAPO_HD float temperature(int64_t row) const { return temperatures ? temperatures[row] : 1.0f; }
    BAPO_HD Transform of_row(int64_t row) const { return at(temperature(row)); }
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

enum class NumberType : int64_t {
    kUInt8,
    kInt8,
    kInt16,
    kInt32,
    kInt64,
    kFloat16,
    kBFloat16,
    kFloat32,
    kFloat64,
};

// A matrix of numbers of any type; data is null where it is not given.
struct Numbers {
    const void* data;
    NumberType type;
    int64_t row_stride;
    int64_t stride;
};

// loss_agg_mode, in the order of config.py.
enum class Aggregation : int64_t {
    kTokenMean,
    kTokenSum,
    kSeqMeanTokenSum,
    kSeqMeanTokenSumNorm,
    kSeqMeanTokenMean,
};

// Of the unmasked tokens of a call.
struct TokenCounts {
    int64_t tokens;
    int64_t sequences;    // with an unmasked token
    int64_t bad_offsets;  // steps of the offsets that break their rule
};

// From the arguments of the caller, [rows, columns], to flat inputs of every kernel.
struct PrepareParams {
    static constexpr int kMostValues = 8;

    int64_t rows;
    int64_t columns;
    Numbers tokens;  // labels, or log-probs, whose values are not read
    bool labels_given;
    Numbers mask;
    Numbers values[kMostValues];  // the advantages first
    int value_count;
    bool per_sequence[kMostValues];  // of packed tokens
    Numbers offsets;                 // of packed sequences; otherwise every row is a sequence
    int64_t sequences;
    Aggregation aggregation;
    double scale;
    double length;   // of a sequence; NaN: columns
    double divisor;  // of a mean; NaN: device_divisor, or counted here
    Numbers device_divisor;
    const float* bounds;
    bool own_bounds;  // of each token: the last two values
    bool live;
    bool* unmasked;
    bool* counted;
    int64_t* labels;
    double* weights;
    float* flat;  // [value_count, rows*columns]
    int32_t* ticket;

    BAPO_HD int64_t count() const { return rows * columns; }
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
    const float* lower;  // bounds of each token; null: the same for all
    const float* upper;
    const double* log_ratios;  // in the place of log_prob - old_log_prob
};

// Without rows.grad this is row_statistics: the first pass alone, for which counted is the only
// input per token beside the label, and undecided is null.
struct RowPassParams {
    LogitRows rows;
    const int64_t* labels;
    TokenInputs tokens;
    PolicyOptions options;
    const float* bounds;  // (lower, upper) of all; null: tokens have their own, or they are not
    Bounds first;         // known yet, between first and last
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

// Sampling masks (CSR): the ids of row n are token_ids[offsets[n], offsets[n + 1]), ascending. A
// row without ids has the whole vocabulary. Nothing is known of the values before they are read.
struct Sets {
    int64_t rows;
    int64_t count;             // of ids, in all rows
    const int64_t* offsets;    // [rows + 1]
    const int32_t* token_ids;  // [count]; null where only the sizes matter
};

// The columns of the vocabulary that are here: all, or [first, first + count) of a total that only
// the device knows.
struct Columns {
    int64_t count;
    const int64_t* shard;  // (first, total)
};

struct FindLabelsParams {
    Sets sets;
    const int64_t* labels;
    int64_t vocab;
    int64_t* positions;
};

// Between rows of logits and the values of their sets: gathered from rows.logits, or scattered to
// rows.grad.
struct MoveSetsParams {
    LogitRows rows;
    Sets sets;
    Columns columns;
    const bool* counted;
    float* values;
};

// Rows with unit stride.
struct Matrix {
    DType dtype;
    int64_t rows;
    int64_t columns;
    void* data;
    int64_t row_stride;
};

struct SetHead {
    Matrix hidden;
    Matrix weight;
    const float* bias;
};

struct MultiplySetsParams {
    SetHead head;
    Sets sets;
    Columns columns;
    const bool* counted;
    float* values;
};

// As of whole rows; pass.rows has the transform alone, and labels are positions in the sets.
// Gradients take the place of the values where pass.undecided is given.
struct SetPassParams {
    RowPassParams pass;
    Sets sets;
    float* values;
};

struct SetGradientParams {
    RowGradientParams gradient;
    Sets sets;
    const float* values;
    float* dvalues;
};

struct SetHiddenGradientParams {
    Matrix weight;
    Sets sets;
    Columns columns;
    const float* dvalues;
    const uint8_t* only;  // rows to write; null: all that have a set
    Matrix dhidden;
};

// multiply, pass and, of decided rows, the gradient of the hidden state.
struct HeadSetPassParams {
    SetPassParams sets;
    SetHead head;
    Matrix dhidden;
};

// The values of every column in the order of segments, which is fixed.
struct SetWeightGradientParams {
    const float* dvalues;
    int64_t count;
    Matrix hidden;
    const int64_t* order;     // [count], into dvalues
    const int32_t* rows;      // [count], of hidden, in that order
    const int64_t* segments;  // [columns + 1], of that order
    bool add;
    Matrix dweight;
    float* dbias;
};

// Sequences of tokens: rows of `length`, or packed ones between offsets.
struct Sequences {
    int64_t tokens;
    int64_t length;
    Numbers offsets;  // data is null where they are rows
    int64_t count;
};

// Means over the counted tokens of each sequence.
struct SequenceMeanParams {
    Sequences sequences;
    const bool* counted;
    const double* values;  // log-probs, or gradients of log-ratios
    const float* old_log_probs;
    bool of_log_probs;
    double* out;  // log-ratios, or gradients of log-probs, to which the means are added
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
    // [ranks, points]: negative mass at every point of the lower grid, then positive mass at every
    // point of the upper grid. This rank's row is written, and the others become 0.
    double* table;
    int64_t ranks;
    int64_t rank;
};

struct TargetParams {
    double target;
    bool ratio;
    bool upper_first;
};

// Where Algorithm 1 stops.
struct SearchResult {
    float* bounds;   // (lower, upper)
    double* masses;  // [kMasses]: (positive, negative) at these bounds, at the starting bounds and
                     // at the last points of the grids
};
constexpr int kMasses = 6;

struct SolveParams {
    const double* table;  // [ranks, points], whose rows are added in order
    int64_t ranks;
    Grid lower;
    Grid upper;
    TargetParams target;
    SearchResult result;
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
    float bapo_pos_share_max;
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
    Bounds last;
    TargetParams target;
    const float* bounds;  // (lower, upper) of all; null: tokens have their own
    // Those of the search; null: those of these tokens.
    const double* masses;
    const bool* unmasked;  // given where tokens may be unmasked and not counted
    int32_t* ticket;       // 0 before and after
    Report* report;
    double* dlog_probs;
    double* dentropy;
    float* outputs;       // log-probs, then entropies, of the caller's output; null: not wanted
    double* dlog_ratios;  // where the policy term's gradients go; null: into dlog_probs
};

}  // namespace bapo
