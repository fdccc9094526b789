// The operators of bapo_kernels/_ops.py over the kernels of a backend: arguments become the plain
// structs of params.h. Checks what memory safety needs; friendly messages are left to the Python
// layer. Uses the stable ABI of torch alone.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <vector>

#include "params.h"

#ifndef BAPO_NAMESPACE
#define BAPO_NAMESPACE bapo_kernels  // of the operators, as in _ops.py
#endif

namespace bapo::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;
template <>
inline constexpr ScalarType kScalarType<bool> = ScalarType::Bool;
template <>
inline constexpr ScalarType kScalarType<uint8_t> = ScalarType::Byte;
template <>
inline constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;

inline DType row_dtype(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::BFloat16: return DType::kBFloat16;
        case ScalarType::Half: return DType::kFloat16;
        default: STD_TORCH_CHECK(false, "logits must be float32, bfloat16 or float16");
    }
}

inline NumberType number_type(const Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
        case ScalarType::Bool:
        case ScalarType::Byte: return NumberType::kUInt8;
        case ScalarType::Char: return NumberType::kInt8;
        case ScalarType::Short: return NumberType::kInt16;
        case ScalarType::Int: return NumberType::kInt32;
        case ScalarType::Long: return NumberType::kInt64;
        case ScalarType::Half: return NumberType::kFloat16;
        case ScalarType::BFloat16: return NumberType::kBFloat16;
        case ScalarType::Float: return NumberType::kFloat32;
        case ScalarType::Double: return NumberType::kFloat64;
        default: STD_TORCH_CHECK(false, name, " must be bool, int or float");
    }
}

// Reads the tensors of a call, all of which must be on the device of the first.
class Arguments {
  public:
    explicit Arguments(const Tensor& first)
        : cuda_(first.is_cuda()), index_(first.get_device_index()) {}

    // The data of a contiguous tensor of `count` elements.
    template <typename T>
    T* data(const Tensor& tensor, int64_t count, const char* name) const {
        STD_TORCH_CHECK(tensor.scalar_type() == kScalarType<T> && tensor.is_contiguous() &&
                            tensor.numel() == count && is_here(tensor),
                        name, " must be a contiguous tensor of ", count,
                        " elements on the device of the first, in the dtype of the schema");
        return static_cast<T*>(tensor.data_ptr());
    }
    template <typename T>
    T* data(const OptionalTensor& tensor, int64_t count, const char* name) const {
        return tensor ? data<T>(*tensor, count, name) : nullptr;
    }

    // A matrix of numbers of any type and strides; a vector is one row.
    Numbers numbers(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) const {
        const int64_t dims = tensor.dim();
        const bool fits = dims == 2   ? tensor.size(0) == rows && tensor.size(1) == columns
                          : dims == 1 ? rows == 1 && tensor.size(0) == columns
                                      : dims == 0 && rows == 1 && columns == 1;
        STD_TORCH_CHECK(fits && is_here(tensor), name, " must have shape [", rows, ", ", columns,
                        "] and be on the device of the first");
        return {tensor.data_ptr(), number_type(tensor, name), dims == 2 ? tensor.stride(0) : 0,
                dims == 0 ? 0 : tensor.stride(dims - 1)};
    }
    Numbers numbers(const OptionalTensor& tensor, int64_t rows, int64_t columns,
                    const char* name) const {
        return tensor ? numbers(*tensor, rows, columns, name) : Numbers{};
    }

    // Where rows have temperatures of their own, these take the place of `temperature`.
    LogitRows logit_rows(const Tensor& logits, const OptionalTensor& dlogits, double temperature,
                         double logit_scale, std::optional<double> softcap,
                         const OptionalTensor& temperatures) const {
        check_rows(logits, "logits");
        LogitRows rows{};
        rows.dtype = row_dtype(logits);
        rows.batches = logits.size(0);
        rows.rows = logits.size(1);
        rows.vocab = logits.size(2);
        rows.logits = logits.data_ptr();
        rows.batch_stride = logits.stride(0);
        rows.row_stride = logits.stride(1);
        if (dlogits) {
            check_rows(*dlogits, "dlogits");
            for (int64_t dim = 0; dim < 3; ++dim) {
                STD_TORCH_CHECK(dlogits->size(dim) == logits.size(dim),
                                "dlogits must have the shape of logits");
            }
            STD_TORCH_CHECK(dlogits->scalar_type() == logits.scalar_type(),
                            "dlogits must have the dtype of logits");
            rows.grad = dlogits->data_ptr();
            rows.grad_batch_stride = dlogits->stride(0);
            rows.grad_row_stride = dlogits->stride(1);
        }
        rows.transform = transform(temperature, logit_scale, softcap, temperatures, rows.count());
        return rows;
    }
    Transform transform(double temperature, double logit_scale, std::optional<double> softcap,
                        const OptionalTensor& temperatures, int64_t rows) const {
        const double by = temperatures ? 1.0 : temperature, slope = logit_scale / by;
        const double scale = softcap ? *softcap / by : slope;
        return {softcap.has_value(),
                logit_scale,
                softcap.value_or(0.0),
                scale,
                slope,
                data<float>(temperatures, rows, "temperatures")};
    }
    void check_matrix(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) const {
        STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns &&
                            (columns <= 1 || tensor.stride(1) == 1) && is_here(tensor),
                        name, " must have shape [", rows, ", ", columns,
                        "], last stride 1, and be on the device of the first");
    }

    TokenInputs token_inputs(int64_t count, const Tensor& counted,
                             const OptionalTensor& old_log_probs, const OptionalTensor& advantages,
                             const OptionalTensor& weights, const OptionalTensor& is_weights,
                             const OptionalTensor& ref_log_probs) const {
        TokenInputs tokens{};
        tokens.counted = data<bool>(counted, count, "counted");
        tokens.old_log_probs = data<float>(old_log_probs, count, "old_log_probs");
        tokens.advantages = data<float>(advantages, count, "advantages");
        tokens.weights = data<double>(weights, count, "weights");
        tokens.is_weights = data<float>(is_weights, count, "rollout_is_weights");
        tokens.ref_log_probs = data<float>(ref_log_probs, count, "ref_log_probs");
        return tokens;
    }

    // Bounds of all tokens, or of each: the pair, or null where tokens get their own.
    const float* bounds(const Tensor& bounds, int64_t count, TokenInputs& tokens) const {
        if (bounds.dim() != 2) return data<float>(bounds, 2, "bounds");
        tokens.lower = data<float>(bounds, 2 * count, "bounds");
        tokens.upper = tokens.lower + count;
        return nullptr;
    }

    // Of packed tokens, or of rows of this length.
    Sequences sequences(int64_t tokens, int64_t length, const OptionalTensor& cu_seqlens) const {
        if (!cu_seqlens) {
            STD_TORCH_CHECK(length > 0 ? tokens % length == 0 : tokens == 0,
                            "length must divide the number of tokens, got ", length);
            return {tokens, length, {}, length > 0 ? tokens / length : 0};
        }
        const int64_t count = cu_seqlens->numel() - 1;
        STD_TORCH_CHECK(count >= 1, "cu_seqlens must have 2 entries or more");
        return {tokens, length, integers(*cu_seqlens, count + 1, "cu_seqlens"), count};
    }
    Numbers integers(const Tensor& tensor, int64_t count, const char* name) const {
        const Numbers made = numbers(tensor, 1, count, name);
        STD_TORCH_CHECK(made.type <= NumberType::kInt64, name, " must be integers");
        return made;
    }

    // A tensor to change in place: rows of its last dimension, with any strides up to three
    // dimensions, contiguous beyond.
    LogitRows rows_of(const Tensor& x) const {
        const int64_t dims = x.dim();
        STD_TORCH_CHECK(x.is_contiguous() || (dims <= 3 && x.stride(dims - 1) == 1),
                        "x must be contiguous, or have at most 3 dimensions and last stride 1");
        LogitRows rows{};
        rows.dtype = row_dtype(x);
        rows.vocab = dims >= 1 ? x.size(dims - 1) : 1;
        rows.rows = dims >= 2 ? x.size(dims - 2) : 1;
        rows.batches = rows.vocab * rows.rows == 0 ? 0 : x.numel() / (rows.vocab * rows.rows);
        // Of a contiguous tensor, dimensions of size 1 may have any stride.
        const bool packed = x.is_contiguous();
        rows.row_stride = packed || dims < 2 ? rows.vocab : x.stride(dims - 2);
        rows.batch_stride = packed || dims < 3 ? rows.rows * rows.vocab : x.stride(dims - 3);
        rows.grad_row_stride = rows.row_stride;
        rows.grad_batch_stride = rows.batch_stride;
        rows.logits = rows.grad = x.data_ptr();
        return rows;
    }

  private:
    bool is_here(const Tensor& tensor) const {
        return tensor.is_cuda() == cuda_ && tensor.get_device_index() == index_;
    }
    void check_rows(const Tensor& tensor, const char* name) const {
        STD_TORCH_CHECK(
            tensor.dim() == 3 && is_here(tensor) && (tensor.size(2) <= 1 || tensor.stride(2) == 1),
            name, " must be a 3-dimensional tensor with last stride 1, on one device");
    }

    bool cuda_;
    int32_t index_;
};

// coefficients: clip_ratio_c, both taus of SAPO, the weights of the KL term and of the entropy.
inline PolicyOptions policy_options(int64_t surrogate, int64_t kl_loss_type,
                                    const std::vector<double>& coefficients) {
    STD_TORCH_CHECK(coefficients.size() == 5, "coefficients must be 5 numbers, got ",
                    coefficients.size());
    return {surrogate,       coefficients[0], coefficients[1], coefficients[2],
            coefficients[3], kl_loss_type,    coefficients[4]};
}

struct Grids {
    Grid lower;
    Grid upper;

    // From start, maximum and step of the lower grid, then of the upper.
    explicit Grids(const std::vector<double>& numbers) {
        STD_TORCH_CHECK(numbers.size() == 6, "grids must be 6 numbers, got ", numbers.size());
        lower = {numbers[0], numbers[1], numbers[2]};
        upper = {numbers[3], numbers[4], numbers[5]};
    }
    int64_t points() const {
        double values[kMaxGridPoints];
        return fill_grid(lower, values) + fill_grid(upper, values);
    }
};

// The rows of a table of contributions.
inline int64_t ranks_of(const Tensor& table) {
    STD_TORCH_CHECK(table.dim() == 2, "table must have shape [ranks, points]");
    return table.size(0);
}

// What every first pass reads and writes; other members are null.
inline RowPassParams first_pass_params(const Arguments& args, const LogitRows& rows,
                                       const Tensor& labels, const Tensor& log_probs,
                                       const Tensor& entropy, const Tensor& stats) {
    RowPassParams params{};
    params.rows = rows;
    params.labels = args.data<int64_t>(labels, rows.count(), "labels");
    params.log_probs = args.data<double>(log_probs, rows.count(), "log_probs");
    params.entropy = args.data<double>(entropy, rows.count(), "entropy");
    params.stats = args.data<double>(stats, 2 * rows.count(), "stats");
    return params;
}

template <typename Backend>
void row_statistics(Tensor logits, Tensor labels, Tensor counted, double temperature,
                    double logit_scale, std::optional<double> softcap, OptionalTensor temperatures,
                    Tensor log_probs, Tensor entropy, Tensor stats) {
    const Arguments args(logits);
    const LogitRows rows =
        args.logit_rows(logits, {}, temperature, logit_scale, softcap, temperatures);
    RowPassParams params = first_pass_params(args, rows, labels, log_probs, entropy, stats);
    params.tokens.counted = args.data<bool>(counted, rows.count(), "counted");
    Backend::row_pass(params, logits);
}

// What a pass that decides takes beside the first pass.
inline void add_policy(const Arguments& args, RowPassParams& params, const Tensor& counted,
                       const OptionalTensor& old_log_probs, const Tensor& advantages,
                       const Tensor& weights, const OptionalTensor& rollout_is_weights,
                       const OptionalTensor& ref_log_probs, const OptionalTensor& bounds,
                       const Grids& grids, const PolicyOptions& options, const Tensor& undecided) {
    const int64_t N = params.rows.count();
    params.tokens = args.token_inputs(N, counted, old_log_probs, advantages, weights,
                                      rollout_is_weights, ref_log_probs);
    params.options = options;
    if (bounds) params.bounds = args.bounds(*bounds, N, params.tokens);
    // Bounds are applied as float32, and so are the ends of their ranges.
    params.first = {(float)grids.lower.start, (float)grids.upper.start};
    params.last = {(float)grids.lower.maximum, (float)grids.upper.maximum};
    params.undecided = args.data<uint8_t>(undecided, N, "undecided");
}

template <typename Backend>
void row_pass(Tensor logits, Tensor labels, Tensor counted, OptionalTensor old_log_probs,
              Tensor advantages, Tensor weights, OptionalTensor rollout_is_weights,
              OptionalTensor ref_log_probs, OptionalTensor bounds, std::vector<double> grid_numbers,
              int64_t surrogate, int64_t kl_loss_type, std::vector<double> coefficients,
              double temperature, double logit_scale, std::optional<double> softcap,
              OptionalTensor temperatures, Tensor log_probs, Tensor entropy, Tensor stats,
              Tensor undecided, Tensor dlogits) {
    const Arguments args(logits);
    const Grids grids(grid_numbers);
    const LogitRows rows =
        args.logit_rows(logits, dlogits, temperature, logit_scale, softcap, temperatures);
    RowPassParams params = first_pass_params(args, rows, labels, log_probs, entropy, stats);
    add_policy(args, params, counted, old_log_probs, advantages, weights, rollout_is_weights,
               ref_log_probs, bounds, grids, policy_options(surrogate, kl_loss_type, coefficients),
               undecided);
    Backend::row_pass(params, logits);
}

template <typename Backend>
void row_pass_(Tensor logits, Tensor labels, Tensor counted, OptionalTensor old_log_probs,
               Tensor advantages, Tensor weights, OptionalTensor rollout_is_weights,
               OptionalTensor ref_log_probs, OptionalTensor bounds,
               std::vector<double> grid_numbers, int64_t surrogate, int64_t kl_loss_type,
               std::vector<double> coefficients, double temperature, double logit_scale,
               std::optional<double> softcap, OptionalTensor temperatures, Tensor log_probs,
               Tensor entropy, Tensor stats, Tensor undecided) {
    row_pass<Backend>(logits, labels, counted, old_log_probs, advantages, weights,
                      rollout_is_weights, ref_log_probs, bounds, grid_numbers, surrogate,
                      kl_loss_type, coefficients, temperature, logit_scale, softcap, temperatures,
                      log_probs, entropy, stats, undecided, logits);
}

inline void add_gradients(const Arguments& args, RowGradientParams& params, int64_t N,
                          const Tensor& labels, const Tensor& stats, const Tensor& entropy,
                          const Tensor& dlog_probs, const OptionalTensor& dentropy,
                          const OptionalTensor& only) {
    params.labels = args.data<int64_t>(labels, N, "labels");
    params.stats = args.data<double>(stats, 2 * N, "stats");
    params.entropy = args.data<double>(entropy, N, "entropy");
    params.dlog_probs = args.data<double>(dlog_probs, N, "dlog_probs");
    params.dentropy = args.data<double>(dentropy, N, "dentropy");
    params.only = args.data<uint8_t>(only, N, "only");
}

template <typename Backend>
void row_gradient(Tensor logits, Tensor labels, Tensor stats, Tensor entropy, Tensor dlog_probs,
                  OptionalTensor dentropy, OptionalTensor only, double temperature,
                  double logit_scale, std::optional<double> softcap, OptionalTensor temperatures,
                  Tensor dlogits) {
    RowGradientParams params{};
    const Arguments args(logits);
    params.rows = args.logit_rows(logits, dlogits, temperature, logit_scale, softcap, temperatures);
    add_gradients(args, params, params.rows.count(), labels, stats, entropy, dlog_probs, dentropy,
                  only);
    Backend::row_gradient(params, logits);
}

template <typename Backend>
void row_gradient_(Tensor logits, Tensor labels, Tensor stats, Tensor entropy, Tensor dlog_probs,
                   OptionalTensor dentropy, OptionalTensor only, double temperature,
                   double logit_scale, std::optional<double> softcap, OptionalTensor temperatures) {
    row_gradient<Backend>(logits, labels, stats, entropy, dlog_probs, dentropy, only, temperature,
                          logit_scale, softcap, temperatures, logits);
}

template <typename Backend>
void prepare(Tensor tokens, OptionalTensor response_mask, std::vector<Tensor> values,
             OptionalTensor cu_seqlens, int64_t aggregation, double scale,
             std::optional<double> length, std::optional<double> divisor,
             OptionalTensor device_divisor, OptionalTensor bounds, bool own_bounds, bool live,
             Tensor unmasked, OptionalTensor counted, OptionalTensor labels, OptionalTensor weights,
             Tensor flat, OptionalTensor ticket) {
    STD_TORCH_CHECK(tokens.dim() == 2, "tokens must have 2 dimensions");
    const Arguments args(tokens);
    PrepareParams params{};
    const int64_t R = params.rows = tokens.size(0), S = params.columns = tokens.size(1);
    const int64_t N = params.count(), count = (int64_t)values.size();
    STD_TORCH_CHECK(count <= PrepareParams::kMostValues && count >= (own_bounds ? 2 : live),
                    "values must be at most ", PrepareParams::kMostValues, ", got ", count);
    STD_TORCH_CHECK(aggregation >= 0 && aggregation <= (int64_t)Aggregation::kSeqMeanTokenMean,
                    "aggregation must be in 0..4, got ", aggregation);
    params.tokens = args.numbers(tokens, R, S, "tokens");
    params.labels_given = params.tokens.type <= NumberType::kInt64;
    params.mask = args.numbers(response_mask, R, S, "response_mask");
    params.sequences = R;
    if (cu_seqlens) {
        params.sequences = cu_seqlens->numel() - 1;
        STD_TORCH_CHECK(R == 1 && params.sequences >= 1,
                        "cu_seqlens must have 2 entries or more, and tokens one row");
        params.offsets = args.integers(*cu_seqlens, params.sequences + 1, "cu_seqlens");
    }
    params.value_count = (int)count;
    for (int k = 0; k < params.value_count; ++k) {
        const bool per_sequence = cu_seqlens && values[k].dim() == 1;
        params.per_sequence[k] = per_sequence;
        const int64_t columns = per_sequence ? params.sequences : S;
        params.values[k] = args.numbers(values[k], per_sequence ? 1 : R, columns, "values");
    }
    params.aggregation = (Aggregation)aggregation;
    params.scale = scale;
    constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();
    params.length = length.value_or(kNotGiven);
    params.divisor = divisor.value_or(kNotGiven);
    params.device_divisor = args.numbers(device_divisor, 1, 1, "device_divisor");
    params.bounds = args.data<float>(bounds, 2, "bounds");
    params.own_bounds = own_bounds;
    params.live = live;
    params.unmasked = args.data<bool>(unmasked, N, "unmasked");
    params.counted = args.data<bool>(counted, N, "counted");
    params.labels = args.data<int64_t>(labels, N, "labels");
    params.weights = args.data<double>(weights, N, "weights");
    params.flat = args.data<float>(flat, count * N, "flat");
    params.ticket = args.data<int32_t>(ticket, 1, "ticket");
    Backend::prepare(params, tokens);
}

template <typename Backend>
void sequence_log_ratios(Tensor log_probs, Tensor counted, OptionalTensor old_log_probs,
                         int64_t length, OptionalTensor cu_seqlens, Tensor log_ratios) {
    const Arguments args(log_probs);
    const int64_t N = log_probs.numel();
    SequenceMeanParams params{};
    params.sequences = args.sequences(N, length, cu_seqlens);
    params.counted = args.data<bool>(counted, N, "counted");
    params.values = args.data<double>(log_probs, N, "log_probs");
    params.old_log_probs = args.data<float>(old_log_probs, N, "old_log_probs");
    params.of_log_probs = true;
    params.out = args.data<double>(log_ratios, N, "log_ratios");
    Backend::sequence_mean(params, log_probs);
}

template <typename Backend>
void add_sequence_means_(Tensor dlog_ratios, Tensor counted, int64_t length,
                         OptionalTensor cu_seqlens, Tensor dlog_probs) {
    const Arguments args(dlog_ratios);
    const int64_t N = dlog_ratios.numel();
    SequenceMeanParams params{};
    params.sequences = args.sequences(N, length, cu_seqlens);
    params.counted = args.data<bool>(counted, N, "counted");
    params.values = args.data<double>(dlog_ratios, N, "dlog_ratios");
    params.out = args.data<double>(dlog_probs, N, "dlog_probs");
    Backend::sequence_mean(params, dlog_ratios);
}

// What the operators of the search read, without where they write it.
inline ContributionParams contribution_params(
    const Arguments& args, const Grids& grids, const Tensor& log_probs, const Tensor& counted,
    const OptionalTensor& old_log_probs, const OptionalTensor& log_ratios, const Tensor& advantages,
    const OptionalTensor& rollout_log_probs, bool uniform_weight, bool gradient) {
    ContributionParams params{};
    const int64_t N = params.count = log_probs.numel();
    params.log_probs = args.data<double>(log_probs, N, "log_probs");
    params.tokens = args.token_inputs(N, counted, old_log_probs, advantages, {}, {}, {});
    params.tokens.log_ratios = args.data<double>(log_ratios, N, "log_ratios");
    params.rollout_log_probs = args.data<float>(rollout_log_probs, N, "rollout_log_probs");
    params.lower = grids.lower;
    params.upper = grids.upper;
    params.uniform_weight = uniform_weight;
    params.gradient = gradient;
    params.ranks = 1;
    return params;
}

inline SearchResult search_result(const Arguments& args, const Tensor& bounds,
                                  const Tensor& masses) {
    return {args.data<float>(bounds, 2, "bounds"), args.data<double>(masses, kMasses, "masses")};
}

template <typename Backend>
void contributions(Tensor log_probs, Tensor counted, OptionalTensor old_log_probs,
                   OptionalTensor log_ratios, Tensor advantages, OptionalTensor rollout_log_probs,
                   std::vector<double> grid_numbers, bool uniform_weight, bool gradient,
                   int64_t rank, Tensor table) {
    const Arguments args(log_probs);
    const Grids grids(grid_numbers);
    ContributionParams params =
        contribution_params(args, grids, log_probs, counted, old_log_probs, log_ratios, advantages,
                            rollout_log_probs, uniform_weight, gradient);
    params.rank = rank;
    params.ranks = ranks_of(table);
    STD_TORCH_CHECK(rank >= 0 && rank < params.ranks, "rank must be a row of table, got ", rank);
    params.table = args.data<double>(table, params.ranks * grids.points(), "table");
    Backend::contributions(params, log_probs);
}

template <typename Backend>
void search(Tensor log_probs, Tensor counted, OptionalTensor old_log_probs,
            OptionalTensor log_ratios, Tensor advantages, OptionalTensor rollout_log_probs,
            std::vector<double> grid_numbers, bool uniform_weight, bool gradient, double target,
            bool ratio_target, bool upper_first, Tensor bounds, Tensor masses) {
    const Arguments args(log_probs);
    const Grids grids(grid_numbers);
    const ContributionParams params =
        contribution_params(args, grids, log_probs, counted, old_log_probs, log_ratios, advantages,
                            rollout_log_probs, uniform_weight, gradient);
    Backend::search(params, {target, ratio_target, upper_first},
                    search_result(args, bounds, masses), log_probs);
}

template <typename Backend>
void solve(Tensor table, std::vector<double> grid_numbers, double target, bool ratio_target,
           bool upper_first, Tensor bounds, Tensor masses) {
    const Arguments args(table);
    const Grids grids(grid_numbers);
    const int64_t ranks = ranks_of(table);
    Backend::solve({args.data<double>(table, ranks * grids.points(), "table"),
                    ranks,
                    grids.lower,
                    grids.upper,
                    {target, ratio_target, upper_first},
                    search_result(args, bounds, masses)},
                   table);
}

template <typename Backend>
void policy(Tensor log_probs, OptionalTensor entropy, Tensor counted, OptionalTensor old_log_probs,
            OptionalTensor log_ratios, Tensor advantages, Tensor weights,
            OptionalTensor rollout_is_weights, OptionalTensor ref_log_probs,
            OptionalTensor rollout_log_probs, Tensor bounds, OptionalTensor masses,
            std::vector<double> grid_numbers, bool uniform_weight, bool gradient, double target,
            bool ratio_target, int64_t surrogate, int64_t kl_loss_type,
            std::vector<double> coefficients, OptionalTensor unmasked, Tensor ticket, Tensor report,
            Tensor dlog_probs, OptionalTensor dentropy, OptionalTensor outputs,
            OptionalTensor dlog_ratios) {
    PolicyParams params{};
    const Arguments args(log_probs);
    const Grids grids(grid_numbers);
    const int64_t N = params.count = log_probs.numel();
    params.log_probs = args.data<double>(log_probs, N, "log_probs");
    params.entropy = args.data<double>(entropy, N, "entropy");
    params.tokens = args.token_inputs(N, counted, old_log_probs, advantages, weights,
                                      rollout_is_weights, ref_log_probs);
    params.rollout_log_probs = args.data<float>(rollout_log_probs, N, "rollout_log_probs");
    params.options = policy_options(surrogate, kl_loss_type, coefficients);
    params.uniform_weight = uniform_weight;
    params.gradient = gradient;
    params.first = {grids.lower.start, grids.upper.start};
    params.last = {grids.lower.last(), grids.upper.last()};
    params.target = {target, ratio_target, false};
    params.tokens.log_ratios = args.data<double>(log_ratios, N, "log_ratios");
    params.bounds = args.bounds(bounds, N, params.tokens);
    params.masses = args.data<double>(masses, kMasses, "masses");
    params.unmasked = args.data<bool>(unmasked, N, "unmasked");
    params.ticket = args.data<int32_t>(ticket, 1, "ticket");
    params.report = reinterpret_cast<Report*>(args.data<float>(report, kReportSize, "report"));
    params.dlog_probs = args.data<double>(dlog_probs, N, "dlog_probs");
    params.dentropy = args.data<double>(dentropy, N, "dentropy");
    params.outputs = args.data<float>(outputs, entropy ? 2 * N : N, "outputs");
    params.dlog_ratios = args.data<double>(dlog_ratios, N, "dlog_ratios");
    Backend::policy(params, log_probs);
}

template <typename Backend, typename Library>
void register_operators(Library& m) {
    m.impl("row_statistics", TORCH_BOX(&row_statistics<Backend>));
    m.impl("row_pass", TORCH_BOX(&row_pass<Backend>));
    m.impl("row_pass_", TORCH_BOX(&row_pass_<Backend>));
    m.impl("row_gradient", TORCH_BOX(&row_gradient<Backend>));
    m.impl("row_gradient_", TORCH_BOX(&row_gradient_<Backend>));
    m.impl("prepare", TORCH_BOX(&prepare<Backend>));
    m.impl("sequence_log_ratios", TORCH_BOX(&sequence_log_ratios<Backend>));
    m.impl("add_sequence_means_", TORCH_BOX(&add_sequence_means_<Backend>));
    m.impl("contributions", TORCH_BOX(&contributions<Backend>));
    m.impl("search", TORCH_BOX(&search<Backend>));
    m.impl("solve", TORCH_BOX(&solve<Backend>));
    m.impl("policy", TORCH_BOX(&policy<Backend>));
}

}  // namespace bapo::binding
