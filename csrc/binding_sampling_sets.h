// The operators between rows and sampling sets, on the head of sets, and of samples, over
// binding.h, which has those on rows of either kind. Ids and offsets are not read here, which would
// wait for the device: the kernels find out what is broken in them.
#pragma once

#include "binding.h"

namespace bapo::binding {

// Kernels write in the dtype of what they read, or in float32.
inline Matrix gradient_of(const Reader& read, const Tensor& tensor, const Matrix& operand,
                          int64_t rows, int64_t columns, const char* name) {
    const Matrix gradient = read.matrix(tensor, rows, columns, name);
    STD_TORCH_CHECK(gradient.dtype == operand.dtype || gradient.dtype == DType::kFloat32, name,
                    " must have the dtype of its operand, or float32");
    return gradient;
}

inline Columns columns_of(const Reader& read, int64_t count, const OptionalTensor& shard) {
    return {count, read.data<int64_t>(shard, 2, "shard")};
}

// A head of these rows; hidden states and weight have one dtype.
inline SetHead head_of(const Reader& read, const Tensor& hidden, const Tensor& weight,
                       const OptionalTensor& bias, int64_t rows) {
    STD_TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2, "hidden and weight must be matrices");
    STD_TORCH_CHECK(hidden.scalar_type() == weight.scalar_type(),
                    "weight must have the dtype of hidden");
    const int64_t V = weight.size(0), H = hidden.size(1);
    return {read.matrix(hidden, rows, H, "hidden"), read.matrix(weight, V, H, "weight"),
            read.data<float>(bias, V, "bias")};
}

template <typename Backend>
void sample_rows(Tensor logits, Tensor labels, Tensor stats, Tensor beside, Tensor seeds,
                 OptionalTensor shard, int64_t samples, OptionalTensor tokens, int64_t present,
                 std::vector<double> options, Tensor counts, Tensor ids, Tensor values,
                 Tensor drawn) {
    const Reader read(logits);
    SampleParams params{};
    params.rows = read.rows(logits, {}, {});
    const int64_t N = params.rows.count(), K = params.labels_per_row = labels_per_row(labels);
    const Fields fields = read.fields(tokens, present, N);
    params.rows.transform = options_of(options).transform(fields[Field::temperatures]);
    params.labels = read.data<int64_t>(labels, N * K, "labels");
    params.stats = read.data<double>(stats, 2 * N, "stats");
    params.beside = read.data<double>(beside, N, "beside");
    params.seeds = read.data<int32_t>(seeds, N, "seeds");
    params.columns = columns_of(read, params.rows.vocab, shard);
    params.samples = samples;
    STD_TORCH_CHECK(ids.dim() == 2, "ids must be a matrix");
    params.places = ids.size(1);
    STD_TORCH_CHECK(samples >= 1 && params.places >= K,
                    "samples must be positive, and ids have a place for each label");
    params.counts = read.data<int32_t>(counts, N, "counts");
    params.ids = read.data<int32_t>(ids, N * params.places, "ids");
    params.values = read.data<float>(values, N * params.places, "values");
    params.drawn = reinterpret_cast<Drawn*>(read.data<double>(drawn, kDrawn * N, "drawn"));
    Backend::sample_rows(params, logits);
}

template <typename Backend>
void find_labels(Tensor labels, Tensor token_ids, Tensor offsets, int64_t vocab, Tensor positions) {
    const Reader read(labels);
    const Sets sets = read.sets(offsets, token_ids, token_ids.numel());
    const int64_t K = labels_per_row(labels), count = sets.rows * K;
    Backend::find_labels({sets, read.data<int64_t>(labels, count, "labels"), K, vocab,
                          read.data<int64_t>(positions, count, "positions")},
                         labels);
}

inline MoveSetsParams move_sets_params(const Reader& read, const LogitRows& rows,
                                       const Tensor& counted, const Tensor& token_ids,
                                       const Tensor& offsets, const OptionalTensor& shard,
                                       const Tensor& values, const char* name) {
    const Sets sets = read.sets(offsets, token_ids, token_ids.numel());
    STD_TORCH_CHECK(sets.rows == rows.count(), "offsets must have rows + 1 entries");
    return {rows, sets, columns_of(read, rows.vocab, shard),
            read.data<bool>(counted, sets.rows, "counted"),
            read.data<float>(values, sets.count, name)};
}

template <typename Backend>
void gather_sets(Tensor logits, Tensor counted, Tensor token_ids, Tensor offsets,
                 OptionalTensor shard, Tensor values) {
    const Reader read(logits);
    const LogitRows rows = read.rows(logits, {}, {});
    Backend::gather_sets(
        move_sets_params(read, rows, counted, token_ids, offsets, shard, values, "values"), logits);
}

template <typename Backend>
void scatter_sets(Tensor dvalues, Tensor counted, Tensor token_ids, Tensor offsets,
                  OptionalTensor shard, Tensor dlogits) {
    const Reader read(dlogits);
    const LogitRows rows = read.rows(dlogits, dlogits, {});
    Backend::scatter_sets(
        move_sets_params(read, rows, counted, token_ids, offsets, shard, dvalues, "dvalues"),
        dlogits);
}

template <typename Backend>
void multiply_sets(Tensor hidden, Tensor weight, OptionalTensor bias, Tensor counted,
                   Tensor token_ids, Tensor offsets, OptionalTensor shard, Tensor values) {
    const Reader read(hidden);
    MultiplySetsParams params{};
    params.sets = read.sets(offsets, token_ids, token_ids.numel());
    params.head = head_of(read, hidden, weight, bias, params.sets.rows);
    params.columns = columns_of(read, params.head.weight.rows, shard);
    params.counted = read.data<bool>(counted, params.sets.rows, "counted");
    params.values = read.data<float>(values, params.sets.count, "values");
    Backend::multiply_sets(params, hidden);
}

template <typename Backend>
void head_sets_pass(Tensor hidden, Tensor weight, OptionalTensor bias, Tensor token_ids,
                    OptionalTensor offsets, Tensor labels, Tensor counted, Tensor weights,
                    Tensor tokens, int64_t present, OptionalTensor bounds,
                    std::vector<double> options, Tensor log_probs, Tensor entropy, Tensor stats,
                    Tensor undecided, Tensor values, Tensor dhidden) {
    const Reader read(hidden);
    STD_TORCH_CHECK(offsets.has_value(), "offsets must be given");
    const LogitRows rows = read.set_rows(values, values, *offsets, token_ids);
    const int64_t N = rows.rows;
    HeadSetPassParams params{};
    params.pass = pass_params(read, rows, labels, counted, weights, tokens, present, bounds,
                              options, log_probs, entropy, stats, undecided);
    params.head = head_of(read, hidden, weight, bias, N);
    params.dhidden =
        gradient_of(read, dhidden, params.head.hidden, N, params.head.hidden.columns, "dhidden");
    Backend::head_sets_pass(params, hidden);
}

template <typename Backend>
void sets_dhidden(Tensor dvalues, Tensor weight, Tensor token_ids, Tensor offsets,
                  OptionalTensor shard, OptionalTensor only, Tensor dhidden) {
    const Reader read(dvalues);
    SetHiddenGradientParams params{};
    STD_TORCH_CHECK(weight.dim() == 2, "weight must be a matrix");
    params.sets = read.sets(offsets, token_ids, dvalues.numel());
    const int64_t N = params.sets.rows, V = weight.size(0), H = weight.size(1);
    params.weight = read.matrix(weight, V, H, "weight");
    params.columns = columns_of(read, V, shard);
    params.dvalues = read.data<float>(dvalues, params.sets.count, "dvalues");
    params.only = read.data<uint8_t>(only, N, "only");
    params.dhidden = gradient_of(read, dhidden, params.weight, N, H, "dhidden");
    Backend::sets_dhidden(params, dvalues);
}

template <typename Backend>
void sets_dweight(Tensor dvalues, Tensor hidden, Tensor order, Tensor rows, Tensor segments,
                  bool add, Tensor dweight, OptionalTensor dbias) {
    const Reader read(dvalues);
    SetWeightGradientParams params{};
    STD_TORCH_CHECK(hidden.dim() == 2 && dweight.dim() == 2, "hidden and dweight must be matrices");
    const int64_t V = dweight.size(0), H = dweight.size(1);
    params.count = dvalues.numel();
    params.dvalues = read.data<float>(dvalues, params.count, "dvalues");
    params.hidden = read.matrix(hidden, hidden.size(0), H, "hidden");
    params.order = read.data<int64_t>(order, params.count, "order");
    params.rows = read.data<int32_t>(rows, params.count, "rows");
    params.segments = read.data<int64_t>(segments, V + 1, "segments");
    params.add = add;
    params.dweight = gradient_of(read, dweight, params.hidden, V, H, "dweight");
    params.dbias = read.data<float>(dbias, V, "dbias");
    Backend::sets_dweight(params, dvalues);
}

template <typename Backend, typename Library>
void register_operators(Library& m) {
    register_operators_on_rows<Backend>(m);
    m.impl("sample_rows", TORCH_BOX(&sample_rows<Backend>));
    m.impl("find_labels", TORCH_BOX(&find_labels<Backend>));
    m.impl("gather_sets", TORCH_BOX(&gather_sets<Backend>));
    m.impl("multiply_sets", TORCH_BOX(&multiply_sets<Backend>));
    m.impl("scatter_sets", TORCH_BOX(&scatter_sets<Backend>));
    m.impl("head_sets_pass", TORCH_BOX(&head_sets_pass<Backend>));
    m.impl("sets_dhidden", TORCH_BOX(&sets_dhidden<Backend>));
    m.impl("sets_dweight", TORCH_BOX(&sets_dweight<Backend>));
}

}  // namespace bapo::binding
