// The operators of bapo_kernels/core/operators.py over the kernels of a backend: what each makes of
// its arguments, by binding_reader.h, and the table of those on rows of either kind. The arguments
// are in the order of the schemas; in another, a call would be refused or read the wrong tensor.
#pragma once

#include <limits>

#include "binding_reader.h"

#ifndef BAPO_NAMESPACE
#define BAPO_NAMESPACE bapo_kernels  // as in core/operators.py
#endif

namespace bapo::binding {

// Reads what both passes over rows take.
template <typename Params>
Params row_params(const Reader& read, const LogitRows& rows, const Tensor& labels,
                  const Fields& fields, const Options& options, const Tensor& entropy,
                  const Tensor& stats) {
    Params params{};
    params.rows = rows;
    params.rows.transform = options.transform(fields[Field::temperatures]);
    const int64_t N = rows.count(), K = params.labels_per_row = labels_per_row(labels);
    params.labels = read.data<int64_t>(labels, N * K, "labels");
    params.entropy = read.data<double>(entropy, N, "entropy");
    params.stats = read.data<double>(stats, 2 * N, "stats");
    return params;
}

// Reads what the first pass takes.
inline RowPassParams statistics_params(const Reader& read, const LogitRows& rows,
                                       const Tensor& labels, const Tensor& counted,
                                       const Fields& fields, const Options& options,
                                       const Tensor& log_probs, const Tensor& entropy,
                                       const Tensor& stats) {
    const int64_t N = rows.count();
    auto params = row_params<RowPassParams>(read, rows, labels, fields, options, entropy, stats);
    params.tokens.counted = read.data<bool>(counted, N, "counted");
    params.log_probs = read.data<double>(log_probs, N * params.labels_per_row, "log_probs");
    return params;
}

// Reads what one kernel of both passes takes.
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

// Both forms of an operator: one writes into its last argument, the other into its first.
template <auto kernel>
struct Forms;
template <typename... Arguments, void (*kernel)(Tensor, Tensor, Arguments...)>
struct Forms<kernel> {
    static void out_of_place(Tensor from, Arguments... arguments, Tensor to) {
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
                  OptionalTensor only, OptionalTensor drawn, OptionalTensor tokens, int64_t present,
                  std::vector<double> options) {
    const Reader read(logits);
    const LogitRows rows = read.rows(logits, dlogits, offsets);
    const int64_t N = rows.count();
    STD_TORCH_CHECK(!drawn || rows.are_sets(), "drawn must be of sets");
    auto params = row_params<RowGradientParams>(read, rows, labels, read.fields(tokens, present, N),
                                                options_of(options), entropy, stats);
    params.dlog_probs = read.data<double>(dlog_probs, N * params.labels_per_row, "dlog_probs");
    params.dentropy = read.data<double>(dentropy, N, "dentropy");
    params.only = read.data<uint8_t>(only, N, "only");
    params.drawn = reinterpret_cast<Drawn*>(read.data<double>(drawn, kDrawn * N, "drawn"));
    Backend::row_gradient(params, logits);
}

// A tensor to change in place, which may have any strides in up to three dimensions.
inline LogitRows rows_in_place(const Tensor& x) {
    const int64_t dims = x.dim();
    STD_TORCH_CHECK(x.is_contiguous() || (dims <= 3 && x.stride(dims - 1) == 1),
                    "x must be contiguous, or have at most 3 dimensions and last stride 1");
    LogitRows rows{};
    rows.dtype = row_dtype(x, "x");
    rows.vocab = dims >= 1 ? x.size(dims - 1) : 1;
    rows.rows = dims >= 2 ? x.size(dims - 2) : 1;
    rows.batches = rows.vocab * rows.rows == 0 ? 0 : x.numel() / (rows.vocab * rows.rows);
    // In a contiguous tensor, dimensions of size 1 may have any stride.
    const bool packed = x.is_contiguous();
    rows.row_stride = packed || dims < 2 ? rows.vocab : x.stride(dims - 2);
    rows.batch_stride = packed || dims < 3 ? rows.rows * rows.vocab : x.stride(dims - 3);
    rows.grad_row_stride = rows.row_stride, rows.grad_batch_stride = rows.batch_stride;
    rows.logits = rows.grad = x.data_ptr();
    return rows;
}

template <typename Backend>
void scale(Tensor x, Tensor factor) {
    Backend::scale(rows_in_place(x), Reader(x).data<float>(factor, 1, "factor"), x);
}

template <typename Backend>
void prepare(Tensor labels_or_log_probs, OptionalTensor response_mask,
             std::vector<OptionalTensor> fields, OptionalTensor cu_seqlens, double scale,
             std::optional<double> divisor, OptionalTensor device_divisor, OptionalTensor bounds,
             bool live, std::vector<double> numbers, Tensor unmasked, OptionalTensor counted,
             OptionalTensor labels, OptionalTensor weights, OptionalTensor tokens,
             OptionalTensor ticket) {
    STD_TORCH_CHECK(labels_or_log_probs.dim() == 2, "labels_or_log_probs must have 2 dimensions");
    STD_TORCH_CHECK(fields.size() == kFields, "fields must be ", kFields, ", got ", fields.size());
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
    STD_TORCH_CHECK(!live || fields[Field::advantages], "advantages must be given with live");
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
    params.old_log_probs = read.fields(tokens, present, N)[Field::old_log_probs];
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

// Reads what both the search and the loss take.
template <typename Params>
Params token_params(const Reader& read, const Tensor& log_probs, const Tensor& counted,
                    const OptionalTensor& log_ratios, const Fields& fields,
                    const Options& options) {
    Params params{};
    const int64_t N = params.count = fields.count;
    params.log_probs = read.data<double>(log_probs, N, "log_probs");
    params.tokens = read.token_inputs(fields, counted);
    params.tokens.log_ratios = read.data<double>(log_ratios, N, "log_ratios");
    params.uniform_weight = options.uniform_weight != 0.0;
    params.unclipped_only = options.unclipped_only != 0.0;
    return params;
}

inline ContributionParams contribution_params(const Reader& read, const Tensor& log_probs,
                                              const Tensor& counted,
                                              const OptionalTensor& log_ratios,
                                              const Tensor& tokens, int64_t present,
                                              const Options& options) {
    const Fields fields = read.fields(tokens, present, log_probs.numel());
    auto params =
        token_params<ContributionParams>(read, log_probs, counted, log_ratios, fields, options);
    params.grids = options.grids();
    params.ranks = 1;
    return params;
}

inline SearchResult search_result(const Reader& read, const Tensor& bounds, const Tensor& masses) {
    return {read.data<float>(bounds, 2, "bounds"),
            reinterpret_cast<Masses*>(read.data<double>(masses, kMasses, "masses"))};
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
    const int64_t N = log_probs.numel();
    const Fields fields = read.fields(tokens, present, N);
    auto params =
        token_params<TokenLossParams>(read, log_probs, counted, log_ratios, fields, options);
    params.entropy = read.data<double>(entropy, N, "entropy");
    params.tokens.weights = read.data<double>(weights, N, "weights");
    params.options = options.policy();
    params.start = options.grids().start();
    params.last = options.grids().last();
    params.target = options.search_target();
    params.bounds = read.bounds(bounds, fields);
    STD_TORCH_CHECK(bounds || fields.has(Field::lower),
                    "bounds must be given, or those of each token");
    params.masses = reinterpret_cast<Masses*>(read.data<double>(masses, kMasses, "masses"));
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
void register_operators_on_rows(Library& m) {
    m.impl("row_statistics", TORCH_BOX(&row_statistics<Backend>));
    m.impl("row_pass", TORCH_BOX(&Forms<row_pass<Backend>>::out_of_place));
    m.impl("row_pass_", TORCH_BOX(&Forms<row_pass<Backend>>::in_place));
    m.impl("row_gradient", TORCH_BOX(&Forms<row_gradient<Backend>>::out_of_place));
    m.impl("row_gradient_", TORCH_BOX(&Forms<row_gradient<Backend>>::in_place));
    m.impl("scale_", TORCH_BOX(&scale<Backend>));
    m.impl("prepare", TORCH_BOX(&prepare<Backend>));
    m.impl("sequence_log_ratios", TORCH_BOX(&sequence_log_ratios<Backend>));
    m.impl("add_sequence_means_", TORCH_BOX(&add_sequence_means_<Backend>));
    m.impl("contributions", TORCH_BOX(&contributions<Backend>));
    m.impl("search", TORCH_BOX(&search<Backend>));
    m.impl("solve", TORCH_BOX(&solve<Backend>));
    m.impl("token_loss", TORCH_BOX(&token_loss<Backend>));
}

}  // namespace bapo::binding
