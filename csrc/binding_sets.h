// The operators on sampling masks, as binding.h has those on whole rows.
#pragma once

#include "binding.h"

namespace bapo::binding {

inline Sets sets_of(const Arguments& args, const OptionalTensor& token_ids, const Tensor& offsets,
                    int64_t count) {
    Sets sets{};
    sets.rows = offsets.numel() - 1;
    STD_TORCH_CHECK(sets.rows >= 0, "offsets must have an entry");
    sets.count = count;
    sets.offsets = args.data<int64_t>(offsets, sets.rows + 1, "offsets");
    sets.token_ids = args.data<int32_t>(token_ids, count, "token_ids");
    return sets;
}

inline Matrix matrix_of(const Arguments& args, const Tensor& tensor, int64_t rows, int64_t columns,
                        const char* name) {
    args.check_matrix(tensor, rows, columns, name);
    return {row_dtype(tensor), rows, columns, tensor.data_ptr(), tensor.stride(0)};
}

// Kernels write in the dtype that they read, or in float32.
inline Matrix gradient_of(const Arguments& args, const Tensor& tensor, const Matrix& read,
                          int64_t rows, int64_t columns, const char* name) {
    const Matrix gradient = matrix_of(args, tensor, rows, columns, name);
    STD_TORCH_CHECK(gradient.dtype == read.dtype || gradient.dtype == DType::kFloat32, name,
                    " must have the dtype of its operand, or float32");
    return gradient;
}

inline Columns columns_of(const Arguments& args, int64_t count, const OptionalTensor& shard) {
    return {count, args.data<int64_t>(shard, 2, "shard")};
}

// A head of these rows; hidden states and weight have one dtype.
inline SetHead head_of(const Arguments& args, const Tensor& hidden, const Tensor& weight,
                       const OptionalTensor& bias, int64_t rows) {
    STD_TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2, "hidden and weight must be matrices");
    STD_TORCH_CHECK(hidden.scalar_type() == weight.scalar_type(),
                    "weight must have the dtype of hidden");
    const int64_t V = weight.size(0), H = hidden.size(1);
    return {matrix_of(args, hidden, rows, H, "hidden"), matrix_of(args, weight, V, H, "weight"),
            args.data<float>(bias, V, "bias")};
}

template <typename Backend>
void find_labels(Tensor labels, Tensor token_ids, Tensor offsets, int64_t vocab, Tensor positions) {
    const Arguments args(labels);
    const Sets sets = sets_of(args, token_ids, offsets, token_ids.numel());
    Backend::find_labels({sets, args.data<int64_t>(labels, sets.rows, "labels"), vocab,
                          args.data<int64_t>(positions, sets.rows, "positions")},
                         labels);
}

inline MoveSetsParams move_sets_params(const Arguments& args, const LogitRows& rows,
                                       const Tensor& counted, const Tensor& token_ids,
                                       const Tensor& offsets, const OptionalTensor& shard,
                                       const Tensor& values, const char* name) {
    const Sets sets = sets_of(args, token_ids, offsets, token_ids.numel());
    STD_TORCH_CHECK(sets.rows == rows.count(), "offsets must have rows + 1 entries");
    return {rows, sets, columns_of(args, rows.vocab, shard),
            args.data<bool>(counted, sets.rows, "counted"),
            args.data<float>(values, sets.count, name)};
}

template <typename Backend>
void gather_sets(Tensor logits, Tensor counted, Tensor token_ids, Tensor offsets,
                 OptionalTensor shard, Tensor values) {
    const Arguments args(logits);
    const LogitRows rows = args.logit_rows(logits, {}, 1.0, 1.0, {}, {});
    Backend::gather_sets(
        move_sets_params(args, rows, counted, token_ids, offsets, shard, values, "values"), logits);
}

template <typename Backend>
void scatter_sets(Tensor dvalues, Tensor counted, Tensor token_ids, Tensor offsets,
                  OptionalTensor shard, Tensor dlogits) {
    const Arguments args(dlogits);
    const LogitRows rows = args.logit_rows(dlogits, dlogits, 1.0, 1.0, {}, {});
    Backend::scatter_sets(
        move_sets_params(args, rows, counted, token_ids, offsets, shard, dvalues, "dvalues"),
        dlogits);
}

template <typename Backend>
void multiply_sets(Tensor hidden, Tensor weight, OptionalTensor bias, Tensor counted,
                   Tensor token_ids, Tensor offsets, OptionalTensor shard, Tensor values) {
    const Arguments args(hidden);
    MultiplySetsParams params{};
    params.sets = sets_of(args, token_ids, offsets, token_ids.numel());
    params.head = head_of(args, hidden, weight, bias, params.sets.rows);
    params.columns = columns_of(args, params.head.weight.rows, shard);
    params.counted = args.data<bool>(counted, params.sets.rows, "counted");
    params.values = args.data<float>(values, params.sets.count, "values");
    Backend::multiply_sets(params, hidden);
}

inline SetPassParams set_pass_params(const Arguments& args, const Tensor& values,
                                     const OptionalTensor& token_ids, const Tensor& offsets,
                                     const Tensor& positions, const Tensor& counted,
                                     double temperature, double logit_scale,
                                     std::optional<double> softcap,
                                     const OptionalTensor& temperatures, const Tensor& log_probs,
                                     const Tensor& entropy, const Tensor& stats) {
    SetPassParams params{};
    params.sets = sets_of(args, token_ids, offsets, values.numel());
    params.values = args.data<float>(values, params.sets.count, "values");
    LogitRows rows{};
    rows.dtype = DType::kFloat32;
    rows.batches = 1;
    rows.rows = params.sets.rows;
    rows.transform = args.transform(temperature, logit_scale, softcap, temperatures, rows.rows);
    params.pass = first_pass_params(args, rows, positions, log_probs, entropy, stats);
    params.pass.tokens.counted = args.data<bool>(counted, rows.rows, "counted");
    return params;
}

template <typename Backend>
void sets_statistics(Tensor values, Tensor offsets, Tensor positions, Tensor counted,
                     double temperature, double logit_scale, std::optional<double> softcap,
                     OptionalTensor temperatures, Tensor log_probs, Tensor entropy, Tensor stats) {
    const Arguments args(values);
    Backend::sets_pass(
        set_pass_params(args, values, {}, offsets, positions, counted, temperature, logit_scale,
                        softcap, temperatures, log_probs, entropy, stats),
        values);
}

template <typename Backend>
void sets_pass_(Tensor values, Tensor offsets, Tensor positions, Tensor counted,
                OptionalTensor old_log_probs, Tensor advantages, Tensor weights,
                OptionalTensor rollout_is_weights, OptionalTensor ref_log_probs,
                OptionalTensor bounds, std::vector<double> grid_numbers, int64_t surrogate,
                int64_t kl_loss_type, std::vector<double> coefficients, double temperature,
                double logit_scale, std::optional<double> softcap, OptionalTensor temperatures,
                Tensor log_probs, Tensor entropy, Tensor stats, Tensor undecided) {
    const Arguments args(values);
    SetPassParams params =
        set_pass_params(args, values, {}, offsets, positions, counted, temperature, logit_scale,
                        softcap, temperatures, log_probs, entropy, stats);
    add_policy(args, params.pass, counted, old_log_probs, advantages, weights, rollout_is_weights,
               ref_log_probs, bounds, Grids(grid_numbers),
               policy_options(surrogate, kl_loss_type, coefficients), undecided);
    Backend::sets_pass(params, values);
}

template <typename Backend>
void head_sets_pass(Tensor hidden, Tensor weight, OptionalTensor bias, Tensor token_ids,
                    Tensor offsets, Tensor positions, Tensor counted, OptionalTensor old_log_probs,
                    Tensor advantages, Tensor weights, OptionalTensor rollout_is_weights,
                    OptionalTensor ref_log_probs, OptionalTensor bounds,
                    std::vector<double> grid_numbers, int64_t surrogate, int64_t kl_loss_type,
                    std::vector<double> coefficients, double temperature, double logit_scale,
                    std::optional<double> softcap, OptionalTensor temperatures, Tensor log_probs,
                    Tensor entropy, Tensor stats, Tensor undecided, Tensor values, Tensor dhidden) {
    const Arguments args(hidden);
    HeadSetPassParams params{};
    params.sets = set_pass_params(args, values, token_ids, offsets, positions, counted, temperature,
                                  logit_scale, softcap, temperatures, log_probs, entropy, stats);
    add_policy(args, params.sets.pass, counted, old_log_probs, advantages, weights,
               rollout_is_weights, ref_log_probs, bounds, Grids(grid_numbers),
               policy_options(surrogate, kl_loss_type, coefficients), undecided);
    const int64_t N = params.sets.sets.rows;
    params.head = head_of(args, hidden, weight, bias, N);
    params.dhidden =
        gradient_of(args, dhidden, params.head.hidden, N, params.head.hidden.columns, "dhidden");
    Backend::head_sets_pass(params, hidden);
}

template <typename Backend>
void sets_gradient(Tensor values, Tensor offsets, Tensor positions, Tensor stats, Tensor entropy,
                   Tensor dlog_probs, OptionalTensor dentropy, OptionalTensor only,
                   double temperature, double logit_scale, std::optional<double> softcap,
                   OptionalTensor temperatures, Tensor dvalues) {
    const Arguments args(values);
    SetGradientParams params{};
    params.sets = sets_of(args, {}, offsets, values.numel());
    const int64_t N = params.sets.rows;
    params.values = args.data<float>(values, params.sets.count, "values");
    params.dvalues = args.data<float>(dvalues, params.sets.count, "dvalues");
    RowGradientParams& gradient = params.gradient;
    gradient.rows.dtype = DType::kFloat32;
    gradient.rows.batches = 1;
    gradient.rows.rows = N;
    gradient.rows.transform = args.transform(temperature, logit_scale, softcap, temperatures, N);
    add_gradients(args, gradient, N, positions, stats, entropy, dlog_probs, dentropy, only);
    Backend::sets_gradient(params, values);
}

template <typename Backend>
void sets_gradient_(Tensor values, Tensor offsets, Tensor positions, Tensor stats, Tensor entropy,
                    Tensor dlog_probs, OptionalTensor dentropy, OptionalTensor only,
                    double temperature, double logit_scale, std::optional<double> softcap,
                    OptionalTensor temperatures) {
    sets_gradient<Backend>(values, offsets, positions, stats, entropy, dlog_probs, dentropy, only,
                           temperature, logit_scale, softcap, temperatures, values);
}

template <typename Backend>
void sets_dhidden(Tensor dvalues, Tensor weight, Tensor token_ids, Tensor offsets,
                  OptionalTensor shard, OptionalTensor only, Tensor dhidden) {
    const Arguments args(dvalues);
    SetHiddenGradientParams params{};
    STD_TORCH_CHECK(weight.dim() == 2, "weight must be a matrix");
    params.sets = sets_of(args, token_ids, offsets, dvalues.numel());
    const int64_t N = params.sets.rows, V = weight.size(0), H = weight.size(1);
    params.weight = matrix_of(args, weight, V, H, "weight");
    params.columns = columns_of(args, V, shard);
    params.dvalues = args.data<float>(dvalues, params.sets.count, "dvalues");
    params.only = args.data<uint8_t>(only, N, "only");
    params.dhidden = gradient_of(args, dhidden, params.weight, N, H, "dhidden");
    Backend::sets_dhidden(params, dvalues);
}

template <typename Backend>
void sets_dweight(Tensor dvalues, Tensor hidden, Tensor order, Tensor rows, Tensor segments,
                  bool add, Tensor dweight, OptionalTensor dbias) {
    const Arguments args(dvalues);
    SetWeightGradientParams params{};
    STD_TORCH_CHECK(hidden.dim() == 2 && dweight.dim() == 2, "hidden and dweight must be matrices");
    const int64_t V = dweight.size(0), H = dweight.size(1);
    params.count = dvalues.numel();
    params.dvalues = args.data<float>(dvalues, params.count, "dvalues");
    params.hidden = matrix_of(args, hidden, hidden.size(0), H, "hidden");
    params.order = args.data<int64_t>(order, params.count, "order");
    params.rows = args.data<int32_t>(rows, params.count, "rows");
    params.segments = args.data<int64_t>(segments, V + 1, "segments");
    params.add = add;
    params.dweight = gradient_of(args, dweight, params.hidden, V, H, "dweight");
    params.dbias = args.data<float>(dbias, V, "dbias");
    Backend::sets_dweight(params, dvalues);
}

template <typename Backend, typename Library>
void register_operators_on_sets(Library& m) {
    m.impl("find_labels", TORCH_BOX(&find_labels<Backend>));
    m.impl("gather_sets", TORCH_BOX(&gather_sets<Backend>));
    m.impl("multiply_sets", TORCH_BOX(&multiply_sets<Backend>));
    m.impl("sets_statistics", TORCH_BOX(&sets_statistics<Backend>));
    m.impl("sets_pass_", TORCH_BOX(&sets_pass_<Backend>));
    m.impl("sets_gradient", TORCH_BOX(&sets_gradient<Backend>));
    m.impl("sets_gradient_", TORCH_BOX(&sets_gradient_<Backend>));
    m.impl("scatter_sets", TORCH_BOX(&scatter_sets<Backend>));
    m.impl("head_sets_pass", TORCH_BOX(&head_sets_pass<Backend>));
    m.impl("sets_dhidden", TORCH_BOX(&sets_dhidden<Backend>));
    m.impl("sets_dweight", TORCH_BOX(&sets_dweight<Backend>));
}

}  // namespace bapo::binding
