// The plain structs that cross into a kernel by value; an optional pointer may be null. Includes
// policy_math.h alone, so that every compiler can read it. If the three lists of names differ from
// those of Python, the package refuses the library.
#pragma once

#include <cstdint>

#include "policy_math.h"

namespace bapo {

constexpr int64_t kIgnoredLabel = -100;

// Fields, options and metrics are known by their place: backends/native.py compares these lists
// with FIELDS, Options and REPORT when it loads the library.
#define BAPO_FIELDS                                                                                \
    advantages, old_log_probs, rollout_log_probs, rollout_is_weights, ref_log_probs, temperatures, \
        lower, upper
#define BAPO_OPTIONS                                                                           \
    lower_start, lower_max, lower_step, upper_start, upper_max, upper_step, target,            \
        target_is_ratio, upper_first, uniform_weight, unclipped_only, surrogate, clip_ratio_c, \
        sapo_tau_pos, sapo_tau_neg, kl_loss_coef, kl_loss_type, entropy_coef, temperature,     \
        logit_scale, softcap, loss_agg_mode, loss_scale_factor
#define BAPO_REPORT                                                                             \
    loss, pg_loss, pg_clipfrac, pg_clipfrac_pos, pg_clipfrac_neg, pg_clipfrac_lower, ppo_kl,    \
        entropy, kl_loss, bapo_clip_low, bapo_clip_high, bapo_pos_share, bapo_pos_share_start,  \
        bapo_pos_share_max, bapo_pos_neg_ratio, bapo_saturated, bapo_acted, tokens, tokens_pos, \
        tokens_neg, live_tokens, loss_adds_up

// Each field is a row of the tokens of a call.
struct Field {
    enum Name : int { BAPO_FIELDS, kCount };
};
constexpr int kFields = Field::kCount;

enum class DType : int64_t {
    kUInt8,
    kInt8,
    kInt16,
    kInt32,
    kInt64,
    kFloat16,
    kBFloat16,
    kFloat32,
    kFloat64
};
// The bytes of a logit.
constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The softmax is of x = scale*y, where y is z, or tanh(logit_scale*z/softcap) under softcap. dx/dz
// is slope, times 1 - y^2 under softcap. Given temperatures, both factors are for temperature 1.
struct Transform {
    bool softcapped;
    double logit_scale, softcap, scale, slope;
    const float* temperatures;  // one per row; null: one for all, which scale and slope contain

    BAPO_HD Transform at(float temperature) const {
        Transform here = *this;
        if (temperatures == nullptr) return here;
        // Another temperature would give wrong numbers without a sign of it.
        const double by = temperature > 0.0f && temperature < INFINITY ? temperature : NAN;
        here.scale /= by;
        here.slope /= by;
        return here;
    }
    BAPO_HD Transform at_row(int64_t row) const {
        return at(temperatures ? temperatures[row] : 1.0f);
    }
};

enum class LossAggMode : int64_t {
    kTokenMean,
    kTokenSum,
    kSeqMeanTokenSum,
    kSeqMeanTokenSumNorm,
    kSeqMeanTokenMean
};

struct Grids {
    Grid lower;
    Grid upper;

    BAPO_HD int points() const { return lower.count + upper.count; }
    BAPO_HD int bins() const { return points() + 2; }  // one more than points on each side
    BAPO_HD Bounds start() const { return {lower.start, upper.start}; }
    BAPO_HD Bounds maximum() const { return {lower.maximum, upper.maximum}; }
    BAPO_HD Bounds last() const { return {lower.last(), upper.last()}; }
};

struct Target {
    double value;
    bool is_ratio;
    bool upper_first;
};

// An absent softcap is infinite, and an absent loss_scale_factor is 0.
struct Options {
    double BAPO_OPTIONS;

    BAPO_HD Grids grids() const {
        return {Grid::of(lower_start, lower_max, lower_step),
                Grid::of(upper_start, upper_max, upper_step)};
    }
    BAPO_HD Target search_target() const {
        return {target, target_is_ratio != 0.0, upper_first != 0.0};
    }
    BAPO_HD PolicyOptions policy() const {
        return {(int64_t)surrogate, clip_ratio_c,          sapo_tau_pos, sapo_tau_neg,
                kl_loss_coef,       (int64_t)kl_loss_type, entropy_coef};
    }
    BAPO_HD Transform transform(const float* temperatures) const {
        const bool softcapped = softcap < INFINITY;
        const double by = temperatures ? 1.0 : temperature, slope = logit_scale / by;
        return {softcapped, logit_scale, softcap, softcapped ? softcap / by : slope,
                slope,      temperatures};
    }
};
constexpr int kOptions = sizeof(Options) / sizeof(double);

// Sampling masks (CSR): the ids of row n are token_ids[offsets[n], offsets[n + 1]), ascending. A
// row without ids has the whole vocabulary. No value has been checked.
struct Sets {
    int64_t rows;
    int64_t count;             // of ids, in all rows
    const int64_t* offsets;    // [rows + 1]
    const int32_t* token_ids;  // [count]; null where only the sizes matter
};

// Logits [batches, rows, vocab] whose last stride is 1, and the place of their gradient: null if it
// is not computed, logits if it replaces them. Strides count elements. If rows are sets, both are
// float32 vectors of their values, without vocabulary or strides, and labels are positions in sets.
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
    Sets sets;

    BAPO_HD int64_t count() const { return batches * rows; }
    template <typename T>
    BAPO_HD const T* logits_at(int64_t row) const {
        return static_cast<const T*>(logits) + offset(row, batch_stride, row_stride);
    }
    template <typename T>
    BAPO_HD T* grad_at(int64_t row) const {
        return static_cast<T*>(grad) + offset(row, grad_batch_stride, grad_row_stride);
    }
    BAPO_HD int64_t offset(int64_t row, int64_t by_batch, int64_t by_row) const {
        if (batches == 1) return row * by_row;  // without the divisions
        return row / rows * by_batch + row % rows * by_row;
    }
    BAPO_HD bool are_sets() const { return sets.offsets != nullptr; }
    BAPO_HD const float* values() const { return static_cast<const float*>(logits); }
    BAPO_HD float* dvalues() const { return static_cast<float*>(grad); }
};

// A matrix of any dtype; without one, data is null.
struct Numbers {
    const void* data;
    DType dtype;
    int64_t row_stride;
    int64_t stride;
};

struct TokenCounts {
    int64_t tokens;       // that are unmasked
    int64_t sequences;    // with an unmasked token
    int64_t bad_offsets;  // steps of the offsets that break their rule
};

// Turns the arguments of the caller, [rows, columns], into the flat inputs of the other kernels.
struct PrepareParams {
    int64_t rows;
    int64_t columns;
    Numbers labels_or_log_probs;  // the values of log-probs are not read
    bool labels_given;
    Numbers response_mask;
    Numbers fields[kFields];
    bool per_sequence[kFields];  // of packed tokens
    Numbers offsets;             // of packed sequences; otherwise every row is a sequence
    int64_t sequences;
    LossAggMode loss_agg_mode;
    double scale;
    double length;   // by which the mode with a norm divides
    double divisor;  // of a mean; NaN: device_divisor, or counted here
    Numbers device_divisor;
    const float* bounds;
    bool live;
    bool* unmasked;
    bool* counted;
    int64_t* labels;
    double* weights;
    float* tokens;  // [kFields, rows*columns], of which given fields are written
    int32_t* ticket;

    BAPO_HD int64_t count() const { return rows * columns; }
};

// One entry per token, all contiguous. The caller's values are float32. Those passed from kernel to
// kernel are double: only the exp of the logits is then rounded to float32.
struct TokenInputs {
    const bool* counted;
    const double* weights;
    const double* log_ratios;  // replace log_prob - old_log_prob
    const float* advantages;
    const float* old_log_probs;
    const float* rollout_log_probs;
    const float* rollout_is_weights;
    const float* ref_log_probs;
    const float* lower;  // bounds of each token; null: the same for all
    const float* upper;
};

// Both passes over rows, or without rows.grad the first alone. Of tokens that reads counted alone;
// it takes several labels per row, whose log-prob is 0 for kIgnoredLabel, and undecided is null.
struct RowPassParams {
    LogitRows rows;
    const int64_t* labels;
    TokenInputs tokens;
    PolicyOptions options;
    const float* bounds;    // (lower, upper) of all tokens; null: each has its own, or the search
    Bounds start, maximum;  // has yet to find them between these
    double* log_probs;
    double* entropy;
    double* stats;       // (origin, sum) of every row, which the second pass of this backend needs
    uint8_t* undecided;  // 1 where the gradient depends on the bounds that the search will find
    int64_t labels_per_row = 1;
};

// A label without a column has no gradient of its own; one that repeats adds to that of the first.
struct RowGradientParams {
    LogitRows rows;
    const int64_t* labels;
    const double* stats;
    const double* entropy;
    const double* dlog_probs;  // of each label
    const double* dentropy;
    const uint8_t* only;  // rows to write; null: all
    int64_t labels_per_row = 1;
    const struct Drawn* drawn = nullptr;  // of rows that are samples
};

// The columns here: the whole vocabulary, or [first, first + count) of a total known on the device.
struct Columns {
    int64_t count;
    const int64_t* shard;  // (first, total)
};

// The sample that stands for a row in its gradient, in units of its 2^t: each smaller id that was
// drawn, which is below the threshold, stands for `part`, and for part*t + shift in the place of
// t*2^t. mass: of all smaller ids.
struct Drawn {
    double threshold, part, shift, mass;
};
constexpr int kDrawn = sizeof(Drawn) / sizeof(double);

// Draws the ids that are kept of each row, with their logits.
struct SampleParams {
    LogitRows rows;
    const int64_t* labels;  // ascending in each row; those without a column are not in [0, vocab)
    int64_t labels_per_row;
    const double* stats;   // of row_pass
    const double* beside;  // 1 - p of the labels
    const int32_t* seeds;
    Columns columns;
    int64_t samples;  // the most that are expected beside the labels
    int64_t places;   // of each row
    int32_t* counts;
    int32_t* ids;   // [rows, places]
    float* values;  // [rows, places]
    Drawn* drawn;
};

struct FindLabelsParams {
    Sets sets;
    const int64_t* labels;
    int64_t labels_per_row;
    int64_t vocab;
    int64_t* positions;
};

// Gathers the values of sets from rows.logits, or scatters them to rows.grad.
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

struct SetHiddenGradientParams {
    Matrix weight;
    Sets sets;
    Columns columns;
    const float* dvalues;
    const uint8_t* only;  // rows to write; null: all that have a set
    Matrix dhidden;
};

// Multiplies, passes over the values, and writes dhidden of decided rows.
struct HeadSetPassParams {
    RowPassParams pass;
    SetHead head;
    Matrix dhidden;
};

// The values of sets in the order of their columns; those of a column in the order of the rows.
struct SortSetsParams {
    Sets sets;
    Columns columns;
    int64_t* order;     // [sets.count]
    int32_t* rows;      // [sets.count], in that order
    int64_t* segments;  // [columns + 1], of that order
};

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

// The mean over the counted tokens of each sequence.
struct SequenceMeanParams {
    Sequences sequences;
    const bool* counted;
    bool forward;  // log-probs to log-ratios; else gradients of these to gradients of those
    const double* in;
    const float* old_log_probs;
    double* out;  // which the means replace, or to which gradients are added
};

struct ContributionParams {
    int64_t count;
    const double* log_probs;
    TokenInputs tokens;
    Grids grids;
    bool uniform_weight;
    bool unclipped_only;
    // [ranks, points]: negative mass at every point of the lower grid, then positive mass at every
    // point of the upper grid. This rank's row is written, and the others become 0.
    double* table;
    int64_t ranks;
    int64_t rank;
};

// The positive and the negative mass at the bounds found, at the first and at the last grid points.
struct Masses {
    double pos, neg, pos_start, neg_start, pos_last, neg_last;
};
constexpr int kMasses = sizeof(Masses) / sizeof(double);

struct SearchResult {
    float* bounds;  // (lower, upper) where Algorithm 1 stops
    Masses* masses;
};

struct SolveParams {
    const double* table;  // [ranks, points], whose rows are added in order
    int64_t ranks;
    Grids grids;
    Target target;
    SearchResult result;
};

struct Report {
    float BAPO_REPORT;
};
constexpr int kReportSize = sizeof(Report) / sizeof(float);

struct TokenLossParams {
    int64_t count;
    const double* log_probs;
    const double* entropy;
    TokenInputs tokens;
    PolicyOptions options;
    bool uniform_weight;
    bool unclipped_only;
    Bounds start;  // of the grids
    Bounds last;
    Target target;
    const float* bounds;   // (lower, upper) of all; null: tokens have their own
    const Masses* masses;  // of the search; null: computed from these tokens
    const bool* unmasked;  // given where tokens may be unmasked and not counted
    int32_t* ticket;       // 0 before and after
    Report* report;
    double* dlog_probs;
    double* dentropy;
    float* outputs;       // log-probs, then entropies, of the caller's output; null: not wanted
    double* dlog_ratios;  // where the policy term's gradients go; null: into dlog_probs
};

}  // namespace bapo
