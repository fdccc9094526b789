// Tensors as the plain structs of params.h, with the checks that memory safety needs: without one
// of them a caller reads foreign memory, and friendly messages are written in Python. May include
// torch's stable ABI and params.h alone; other headers would tie the library to one torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "params.h"

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

// The tokens of a call.
struct Fields {
    bool given;
    const float* data;
    int64_t present;
    int64_t count;

    bool has(Field::Name field) const { return present >> field & 1; }
    // Null if the field is absent.
    const float* operator[](Field::Name field) const {
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

    Fields fields(const OptionalTensor& tokens, int64_t present, int64_t count) const {
        STD_TORCH_CHECK(!tokens || (tokens->dim() == 2 && tokens->size(0) == kFields),
                        "tokens must have shape [", kFields, ", N]");
        const float* const data = this->data<float>(tokens, kFields * count, "tokens");
        return {tokens.has_value(), data, present, count};
    }
    TokenInputs token_inputs(const Fields& fields, const Tensor& counted) const {
        STD_TORCH_CHECK(fields.has(Field::advantages),
                        "advantages must be among the fields of tokens");
        STD_TORCH_CHECK(fields.has(Field::lower) == fields.has(Field::upper),
                        "tokens must have both lower and upper, or none");
        TokenInputs inputs{};
        inputs.counted = data<bool>(counted, fields.count, "counted");
        inputs.advantages = fields[Field::advantages];
        inputs.old_log_probs = fields[Field::old_log_probs];
        inputs.rollout_log_probs = fields[Field::rollout_log_probs];
        inputs.rollout_is_weights = fields[Field::rollout_is_weights];
        inputs.ref_log_probs = fields[Field::ref_log_probs];
        inputs.lower = fields[Field::lower];
        inputs.upper = fields[Field::upper];
        return inputs;
    }
    // Null if tokens have their own.
    const float* bounds(const OptionalTensor& bounds, const Fields& fields) const {
        return fields.has(Field::lower) ? nullptr : data<float>(bounds, 2, "bounds");
    }

    // Rows of logits, or with offsets the values of sets.
    LogitRows rows(const Tensor& logits, const OptionalTensor& dlogits,
                   const OptionalTensor& offsets) const {
        if (offsets) return set_rows(logits, dlogits, *offsets, {});
        check_rows(logits, "logits");
        LogitRows rows{};
        rows.dtype = row_dtype(logits, "logits");
        rows.batches = logits.size(0), rows.rows = logits.size(1), rows.vocab = logits.size(2);
        rows.logits = logits.data_ptr();
        rows.batch_stride = logits.stride(0), rows.row_stride = logits.stride(1);
        if (!dlogits) return rows;
        check_rows(*dlogits, "dlogits");
        const bool same = dlogits->size(0) == rows.batches && dlogits->size(1) == rows.rows;
        STD_TORCH_CHECK(same && dlogits->size(2) == rows.vocab,
                        "dlogits must have the shape of logits");
        STD_TORCH_CHECK(dlogits->scalar_type() == logits.scalar_type(),
                        "dlogits must have the dtype of logits");
        rows.grad = dlogits->data_ptr();
        rows.grad_batch_stride = dlogits->stride(0), rows.grad_row_stride = dlogits->stride(1);
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

    // Packed tokens, or rows of this length.
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
        const Numbers integers = numbers(tensor, 1, count, name);
        STD_TORCH_CHECK(integers.dtype <= DType::kInt64, name, " must be integers");
        return integers;
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

// A table of contributions has a row for each rank.
inline int64_t ranks_of(const Tensor& table) {
    STD_TORCH_CHECK(table.dim() == 2, "table must have shape [ranks, points]");
    return table.size(0);
}

inline int64_t labels_per_row(const Tensor& labels) {
    const int64_t K = labels.dim() == 2 ? labels.size(1) : 1;
    STD_TORCH_CHECK(K >= 1, "labels must be one or more per row");
    return K;
}

}  // namespace bapo::binding
