// The operators of bapo_kernels/core/operators.py over the kernels of a backend: tensors become the
// plain structs of params.h. May include torch's stable ABI and params.h alone; other headers of
// torch would tie the library to one version of it. Checks what memory safety needs, and no more:
// without a check here a caller reads foreign memory; friendly messages are written in Python.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "params.h"

#ifndef BAPO_NAMESPACE
#define BAPO_NAMESPACE bapo_kernels  // as in core/operators.py
#endif

namespace bapo::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
constexpr ScalarType scalar_type() {
    if (std::is_same_v<T, float>) return ScalarType::Float;
    if (std::is_same_v<T, double>) return ScalarType::Double;
    if (std::is_same_v<T, int64_t>) return ScalarType::Long;
    if (std::is_same_v<T, int32_t>) return ScalarType::Int;
    return std::is_same_v<T, bool> ? ScalarType::Bool : ScalarType::Byte;
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
        case ScalarType::Bool:
        case ScalarType::Byte: return DType::kUInt8;
        case ScalarType::Char: return DType::kInt8;
        case ScalarType::Short: return DType::kInt16;
        case ScalarType::Int: return DType::kInt32;
        case ScalarType::Long: return DType::kInt64;
        case ScalarType::Half: return DType::kFloat16;
        case ScalarType::BFloat16: return DType::kBFloat16;
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::Double: return DType::kFloat64;
        default: STD_TORCH_CHECK(false, name, " must be bool, int or float");
    }
}
inline DType row_dtype(const Tensor& tensor, const char* name) {
    const DType dtype = dtype_of(tensor, name);
    STD_TORCH_CHECK(dtype >= DType::kFloat16 && dtype <= DType::kFloat32, name,
                    " must be float32, bfloat16 or float16");
    return dtype;
}

// The fields of the tokens of a call.
struct Fields {
    bool given;
    const float* data;
    int64_t present;
    int64_t count;

    bool has(Field field) const { return present >> field & 1; }
    // Null: absent.
    const float* operator[](Field field) const {
        STD_TORCH_CHECK(given || !has(field), "tokens must be given with the fields present");
        return has(field) ? data + field * count : nullptr;
    }
};

inline Options options_of(const std::vector<double>& numbers) {
    STD_TORCH_CHECK(numbers.size() == kOptions, "options must be ", kOptions, " numbers, got ",
                    numbers.size());
    Options options;
    std::memcpy(&options, numbers.data(), sizeof options);
    const auto is_choice = [](double number, int64_t last) {
        return number >= 0 && number <= (double)last;
    };
    STD_TORCH_CHECK(is_choice(options.surrogate, kMask) && is_choice(options.kl_loss_type, kK3) &&
                        is_choice(options.loss_agg_mode, (int64_t)LossAggMode::kSeqMeanTokenMean),
                    "surrogate, kl_loss_type and loss_agg_mode must be numbers of choices");
    return options;
}

// Reads the tensors of a call, all of which must be on the device of the first.
class Reader {
  public:
    explicit Reader(const Tensor& first)
        : cuda_(first.is_cuda()), index_(first.get_device_index()) {}

    // The data of a contiguous tensor of `count` elements.
    template <typename T>
    T* data(const Tensor& tensor, int64_t count, const char* name) const {
        STD_TORCH_CHECK(tensor.scalar_type() == scalar_type<T>() && tensor.is_contiguous() &&
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
        return {tensor.data_ptr(), dtype_of(tensor, name), dims == 2 ? tensor.stride(0) : 0,
                dims == 0 ? 0 : tensor.stride(dims - 1)};
    }
    Numbers numbers(const OptionalTensor& tensor, int64_t rows, int64_t columns,
                    const char* name) const {
        return tensor ? numbers(*tensor, rows, columns, name) : Numbers{};
    }

    // Without a tensor there are no fields to read.
    Fields fields(const OptionalTensor& tokens, int64_t present, int64_t count) const {
        STD_TORCH_CHECK(!tokens || (tokens->dim() == 2 && tokens->size(0) == kFields),
                        "tokens must have shape [", (int)kFields, ", N]");
        const float* const data = this->data<float>(tokens, kFields * count, "tokens");
        return {tokens.has_value(), data, present, count};
    }
    TokenInputs token_inputs(const Fields& fields, const Tensor& counted) const {
        STD_TORCH_CHECK(fields.has(kAdvantages), "advantages must be among the fields of tokens");
        STD_TORCH_CHECK(fields.has(kLower) == fields.has(kUpper),
                        "tokens must have both lower and upper, or none");
        TokenInputs inputs{};
        inputs.counted = data<bool>(counted, fields.count, "counted");
        inputs.advantages = fields[kAdvantages];
        inputs.old_log_probs = fields[kOldLogProbs];
        inputs.rollout_log_probs = fields[kRolloutLogProbs];
        inputs.rollout_is_weights = fields[kRolloutIsWeights];
        inputs.ref_log_probs = fields[kRefLogProbs];
        inputs.lower = fields[kLower];
        inputs.upper = fields[kUpper];
        return inputs;
    }
    // Of all tokens; null where they have their own.
    const float* bounds(const OptionalTensor& bounds, const Fields& fields) const {
        return fields.has(kLower) ? nullptr : data<float>(bounds, 2, "bounds");
    }

    // Rows of logits, or with offsets the values of sets.
    LogitRows rows(const Tensor& logits, const OptionalTensor& dlogits,
                   const OptionalTensor& offsets) const {
        if (offsets) return set_rows(logits, dlogits, *offsets, {});
        check_rows(logits, "logits");
        LogitRows rows{};
        rows.dtype = row_dtype(logits, "logits");
        rows.batches = logits.size(0);
        rows.rows = logits.size(1);
        rows.vocab = logits.size(2);
        rows.logits = logits.data_ptr();
        rows.batch_stride = logits.stride(0);
        rows.row_stride = logits.stride(1);
        if (!dlogits) return rows;
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
        return rows;
    }
    LogitRows set_rows(const Tensor& values, const OptionalTensor& dvalues, const Tensor& offsets,
                       const OptionalTensor& token_ids) const {
        LogitRows rows{};
        rows.sets = sets(offsets, token_ids, values.numel());
        rows.dtype = DType::kFloat32;
        rows.batches = 1;
        rows.rows = rows.sets.rows;
        rows.logits = data<float>(values, rows.sets.count, "values");
        rows.grad = data<float>(dvalues, rows.sets.count, "dvalues");
        return rows;
    }
    // Of `count` values; ids are given where they matter.
    Sets sets(const Tensor& offsets, const OptionalTensor& token_ids, int64_t count) const {
        const int64_t rows = offsets.numel() - 1;
        STD_TORCH_CHECK(rows >= 0, "offsets must have an entry");
        return {rows, count, data<int64_t>(offsets, rows + 1, "offsets"),
                data<int32_t>(token_ids, count, "token_ids")};
    }
    Matrix matrix(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) const {
        STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns &&
                            (columns <= 1 || tensor.stride(1) == 1) && is_here(tensor),
                        name, " must have shape [", rows, ", ", columns,
                        "], last stride 1, and be on the device of the first");
        return {row_dtype(tensor, name), rows, columns, tensor.data_ptr(), tensor.stride(0)};
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
        STD_TORCH_CHECK(made.dtype <= DType::kInt64, name, " must be integers");
        return made;
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

// The rows of a table of contributions.
inline int64_t ranks_of(const Tensor& table) {
    STD_TORCH_CHECK(table.dim() == 2, "table must have shape [ranks, points]");
    return table.size(0);
}

inline int64_t labels_per_row(const Tensor& labels) {
    const int64_t K = labels.dim() == 2 ? labels.size(1) : 1;
    STD_TORCH_CHECK(K >= 1, "labels must be one or more per row");
    return K;
}

// The first pass alone.
inline RowPassParams statistics_params(const Reader& read, LogitRows rows, const Tensor& labels,
                                       const Tensor& counted, const Fields& fields,
                                       const Options& options, const Tensor& log_probs,
                                       const Tensor& entropy, const Tensor& stats) {
    RowPassParams params{};
    const int64_t N = rows.count();
    rows.transform = options.transform(fields[kTemperatures]);
    params.rows = rows;
    const int64_t K = params.labels_per_row = labels_per_row(labels);
    params.labels = read.data<int64_t>(labels, N * K, "labels");
    params.tokens.counted = read.data<bool>(counted, N, "counted");
    params.log_probs = read.data<double>(log_probs, N * K, "log_probs");
    params.entropy = read.data<double>(entropy, N, "entropy");
    params.stats = read.data<double>(stats, 2 * N, "stats");
    return params;
}

// Both passes.
inline RowPassParams pass_params(const Reader& read, const LogitRows& rows, const Tensor& labels,
                                 const Tensor& counted, const Tensor& weights, const Tensor& tokens,
                                 int64_t present, const OptionalTensor& bounds,
                                 const std::vector<double>& numbers, const Tensor& log_probs,
                                 const Tensor& entropy, const Tensor& stats,
                                 const Tensor& undecided) {
    const int64_t N = rows.count();
    const Options options = options_of(numbers);
    const Fields fields = read.fields(tokens, present, N);
    RowPassParams params =
        statistics_params(read, rows, labels, counted, fields, options, log_probs, entropy, stats);
    STD_TORCH_CHECK(params.labels_per_row == 1, "labels must be one per row");
    params.tokens = read.token_inputs(fields, counted);
    params.tokens.weights = read.data<double>(weights, N, "weights");
    params.options = options.policy();
    params.bounds = read.bounds(bounds, fields);
    params.start = options.grids().start();
    params.maximum = options.grids().maximum();
    params.undecided = read.data<uint8_t>(undecided, N, "undecided");
    return params;
}

template <typename Backend>
void row_statistics(Tensor logits, OptionalTensor offsets, Tensor labels, Tensor counted,
                    OptionalTensor tokens, int64_t present, std::vector<double> options,
                    Tensor log_probs, Tensor entropy, Tensor stats) {
    const Reader read(logits);
    const LogitRows rows = read.rows(logits, {}, offsets);
    const Fields fields = read.fields(tokens, present, rows.count());
    Backend::row_pass(statistics_params(read, rows, labels, counted, fields, options_of(options),
                                        log_probs, entropy, stats),
                      logits);
}

// An operator that writes into its last argument, and the one that writes into its first.
template <auto kernel>
struct Placed;
template <typename... Arguments, void (*kernel)(Tensor, Tensor, Arguments...)>
struct Placed<kernel> {
    static void apart(Tensor from, Arguments... arguments, Tensor to) {
        kernel(from, to, arguments...);
    }
    static void in_place(Tensor x, Arguments... arguments) { kernel(x, x, arguments...); }
};

template <typename Backend>
void row_pass(Tensor logits, Tensor dlogits, OptionalTensor offsets, Tensor labels, Tensor counted,
              Tensor weights, Tensor tokens, int64_t present, OptionalTensor bounds,
              std::vector<double> options, Tensor log_probs, Tensor entropy, Tensor stats,
              Tensor undecided) {
    const Reader read(logits);
    const LogitRows rows = read.rows(logits, dlogits, offsets);
    Backend::row_pass(pass_params(read, rows, labels, counted, weights, tokens, present, bounds,
                                  options, log_probs, entropy, stats, undecided),
                      logits);
}

template <typename Backend>
void row_gradient(Tensor logits, Tensor dlogits, OptionalTensor offsets, Tensor labels,
                  Tensor stats, Tensor entropy, Tensor dlog_probs, OptionalTensor dentropy,
                  OptionalTensor only, OptionalTensor tokens, int64_t present,
                  std::vector<double> options) {
    const Reader read(logits);
    RowGradientParams params{};
    params.rows = read.rows(logits, dlogits, offsets);
    const int64_t N = params.rows.count();
    const Fields fields = read.fields(tokens, present, N);
    params.rows.transform = options_of(options).transform(fields[kTemperatures]);
    const int64_t K = params.labels_per_row = labels_per_row(labels);
    params.labels = read.data<int64_t>(labels, N * K, "labels");
    params.stats = read.data<double>(stats, 2 * N, "stats");
    params.entropy = read.data<double>(entropy, N, "entropy");
    params.dlog_probs = read.data<double>(dlog_probs, N * K, "dlog_probs");
    params.dentropy = read.data<double>(dentropy, N, "dentropy");
    params.only = read.data<uint8_t>(only, N, "only");
    Backend::row_gradient(params, logits);
}

template <typename Backend>
void prepare(Tensor labels_or_log_probs, OptionalTensor response_mask,
             std::vector<OptionalTensor> fields, OptionalTensor cu_seqlens, double scale,
             std::optional<double> divisor, OptionalTensor device_divisor, OptionalTensor bounds,
             bool live, std::vector<double> numbers, Tensor unmasked, OptionalTensor counted,
             OptionalTensor labels, OptionalTensor weights, OptionalTensor tokens,
             OptionalTensor ticket) {
    STD_TORCH_CHECK(labels_or_log_probs.dim() == 2, "labels_or_log_probs must have 2 dimensions");
    STD_TORCH_CHECK(fields.size() == kFields, "fields must be ", (int)kFields, ", got ",
                    fields.size());
    const Reader read(labels_or_log_probs);
    const Options options = options_of(numbers);
    PrepareParams params{};
    const int64_t R = params.rows = labels_or_log_probs.size(0);
    const int64_t S = params.columns = labels_or_log_probs.size(1), N = params.count();
    params.labels_or_log_probs = read.numbers(labels_or_log_probs, R, S, "labels_or_log_probs");
    params.labels_given = params.labels_or_log_probs.dtype <= DType::kInt64;
    params.response_mask = read.numbers(response_mask, R, S, "response_mask");
    params.sequences = R;
    if (cu_seqlens) {
        params.sequences = cu_seqlens->numel() - 1;
        STD_TORCH_CHECK(R == 1 && params.sequences >= 1,
                        "cu_seqlens must have 2 entries or more, and tokens one row");
        params.offsets = read.integers(*cu_seqlens, params.sequences + 1, "cu_seqlens");
    }
    for (int k = 0; k < kFields; ++k) {
        if (!fields[k]) continue;
        STD_TORCH_CHECK(tokens.has_value(), "tokens must be given with fields");
        const bool per_sequence = cu_seqlens && fields[k]->dim() == 1;
        params.per_sequence[k] = per_sequence;
        const int64_t columns = per_sequence ? params.sequences : S;
        params.fields[k] = read.numbers(fields[k], per_sequence ? 1 : R, columns, "fields");
    }
    STD_TORCH_CHECK(!live || fields[kAdvantages], "advantages must be given with live");
    params.loss_agg_mode = (LossAggMode)options.loss_agg_mode;
    params.scale = scale;
    params.length = options.loss_scale_factor != 0.0 ? options.loss_scale_factor : (double)S;
    params.divisor = divisor.value_or(std::numeric_limits<double>::quiet_NaN());
    params.device_divisor = read.numbers(device_divisor, 1, 1, "device_divisor");
    params.bounds = read.data<float>(bounds, 2, "bounds");
    params.live = live;
    params.unmasked = read.data<bool>(unmasked, N, "unmasked");
    params.counted = read.data<bool>(counted, N, "counted");
    params.labels = read.data<int64_t>(labels, N, "labels");
    params.weights = read.data<double>(weights, N, "weights");
    params.tokens = read.data<float>(tokens, kFields * N, "tokens");
    params.ticket = read.data<int32_t>(ticket, 1, "ticket");
    Backend::prepare(params, labels_or_log_probs);
}

template <typename Backend>
void sequence_log_ratios(Tensor log_probs, Tensor counted, Tensor tokens, int64_t present,
                         int64_t length, OptionalTensor cu_seqlens, Tensor log_ratios) {
    const Reader read(log_probs);
    const int64_t N = log_probs.numel();
    SequenceMeanParams params{};
    params.sequences = read.sequences(N, length, cu_seqlens);
    params.counted = read.data<bool>(counted, N, "counted");
    params.forward = true;
    params.in = read.data<double>(log_probs, N, "log_probs");
    params.old_log_probs = read.fields(tokens, present, N)[kOldLogProbs];
    params.out = read.data<double>(log_ratios, N, "log_ratios");
    Backend::sequence_mean(params, log_probs);
}

template <typename Backend>
void add_sequence_means_(Tensor dlog_ratios, Tensor counted, int64_t length,
                         OptionalTensor cu_seqlens, Tensor dlog_probs) {
    const Reader read(dlog_ratios);
    const int64_t N = dlog_ratios.numel();
    SequenceMeanParams params{};
    params.sequences = read.sequences(N, length, cu_seqlens);
    params.counted = read.data<bool>(counted, N, "counted");
    params.in = read.data<double>(dlog_ratios, N, "dlog_ratios");
    params.out = read.data<double>(dlog_probs, N, "dlog_probs");
    Backend::sequence_mean(params, dlog_ratios);
}

// What the operators of the search read, without where they write it.
inline ContributionParams contribution_params(const Reader& read, const Tensor& log_probs,
                                              const Tensor& counted,
                                              const OptionalTensor& log_ratios,
                                              const Tensor& tokens, int64_t present,
                                              const Options& options) {
    ContributionParams params{};
    const int64_t N = params.count = log_probs.numel();
    params.log_probs = read.data<double>(log_probs, N, "log_probs");
    params.tokens = read.token_inputs(read.fields(tokens, present, N), counted);
    params.tokens.log_ratios = read.data<double>(log_ratios, N, "log_ratios");
    params.grids = options.grids();
    params.uniform_weight = options.uniform_weight != 0.0;
    params.unclipped_only = options.unclipped_only != 0.0;
    params.ranks = 1;
    return params;
}

inline SearchResult search_result(const Reader& read, const Tensor& bounds, const Tensor& masses) {
    return {read.data<float>(bounds, 2, "bounds"), read.data<double>(masses, kMasses, "masses")};
}

template <typename Backend>
void contributions(Tensor log_probs, Tensor counted, OptionalTensor log_ratios, Tensor tokens,
                   int64_t present, std::vector<double> options, int64_t rank, Tensor table) {
    const Reader read(log_probs);
    ContributionParams params = contribution_params(read, log_probs, counted, log_ratios, tokens,
                                                    present, options_of(options));
    params.rank = rank;
    params.ranks = ranks_of(table);
    STD_TORCH_CHECK(rank >= 0 && rank < params.ranks, "rank must be a row of table, got ", rank);
    params.table = read.data<double>(table, params.ranks * params.grids.points(), "table");
    Backend::contributions(params, log_probs);
}

template <typename Backend>
void search(Tensor log_probs, Tensor counted, OptionalTensor log_ratios, Tensor tokens,
            int64_t present, std::vector<double> numbers, Tensor bounds, Tensor masses) {
    const Reader read(log_probs);
    const Options options = options_of(numbers);
    Backend::search(
        contribution_params(read, log_probs, counted, log_ratios, tokens, present, options),
        options.search_target(), search_result(read, bounds, masses), log_probs);
}

template <typename Backend>
void solve(Tensor table, std::vector<double> numbers, Tensor bounds, Tensor masses) {
    const Reader read(table);
    const Options options = options_of(numbers);
    const Grids grids = options.grids();
    const int64_t ranks = ranks_of(table);
    Backend::solve({read.data<double>(table, ranks * grids.points(), "table"), ranks, grids,
                    options.search_target(), search_result(read, bounds, masses)},
                   table);
}

template <typename Backend>
void token_loss(Tensor log_probs, OptionalTensor entropy, Tensor counted, OptionalTensor unmasked,
                Tensor weights, OptionalTensor log_ratios, Tensor tokens, int64_t present,
                OptionalTensor bounds, OptionalTensor masses, std::vector<double> numbers,
                Tensor ticket, Tensor report, Tensor dlog_probs, OptionalTensor dentropy,
                OptionalTensor outputs, OptionalTensor dlog_ratios) {
    const Reader read(log_probs);
    const Options options = options_of(numbers);
    TokenLossParams params{};
    const int64_t N = params.count = log_probs.numel();
    const Fields fields = read.fields(tokens, present, N);
    params.log_probs = read.data<double>(log_probs, N, "log_probs");
    params.entropy = read.data<double>(entropy, N, "entropy");
    params.tokens = read.token_inputs(fields, counted);
    params.tokens.weights = read.data<double>(weights, N, "weights");
    params.tokens.log_ratios = read.data<double>(log_ratios, N, "log_ratios");
    params.options = options.policy();
    params.uniform_weight = options.uniform_weight != 0.0;
    params.unclipped_only = options.unclipped_only != 0.0;
    params.start = options.grids().start();
    params.last = options.grids().last();
    params.target = options.search_target();
    params.bounds = read.bounds(bounds, fields);
    STD_TORCH_CHECK(bounds || fields.has(kLower), "bounds must be given, or those of each token");
    params.masses = read.data<double>(masses, kMasses, "masses");
    params.unmasked = read.data<bool>(unmasked, N, "unmasked");
    params.ticket = read.data<int32_t>(ticket, 1, "ticket");
    params.report = reinterpret_cast<Report*>(read.data<float>(report, kReportSize, "report"));
    params.dlog_probs = read.data<double>(dlog_probs, N, "dlog_probs");
    params.dentropy = read.data<double>(dentropy, N, "dentropy");
    params.outputs = read.data<float>(outputs, entropy ? 2 * N : N, "outputs");
    params.dlog_ratios = read.data<double>(dlog_ratios, N, "dlog_ratios");
    Backend::token_loss(params, log_probs);
}

template <typename Backend, typename Library>
void register_operators(Library& m) {
    m.impl("row_statistics", TORCH_BOX(&row_statistics<Backend>));
    m.impl("row_pass", TORCH_BOX(&Placed<row_pass<Backend>>::apart));
    m.impl("row_pass_", TORCH_BOX(&Placed<row_pass<Backend>>::in_place));
    m.impl("row_gradient", TORCH_BOX(&Placed<row_gradient<Backend>>::apart));
    m.impl("row_gradient_", TORCH_BOX(&Placed<row_gradient<Backend>>::in_place));
    m.impl("prepare", TORCH_BOX(&prepare<Backend>));
    m.impl("sequence_log_ratios", TORCH_BOX(&sequence_log_ratios<Backend>));
    m.impl("add_sequence_means_", TORCH_BOX(&add_sequence_means_<Backend>));
    m.impl("contributions", TORCH_BOX(&contributions<Backend>));
    m.impl("search", TORCH_BOX(&search<Backend>));
    m.impl("solve", TORCH_BOX(&solve<Backend>));
    m.impl("token_loss", TORCH_BOX(&token_loss<Backend>));
}

}  // namespace bapo::binding
