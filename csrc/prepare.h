// Makes the flat inputs of a token from the arguments of the caller, which have any dtype and
// strides, per token or per sequence; for CPU and CUDA, on params.h. The host never reads values on
// a device: what breaks a rule must become NaN here, or nobody notices it.
#pragma once

#include <cstring>

#include "params.h"

namespace bapo {

BAPO_HD float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
BAPO_HD float float_of_half(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size < 0x400u) return (sign ? -0x1p-24f : 0x1p-24f) * (float)size;
    const uint32_t rebias = size < 0x7c00u ? 112u << 23 : 224u << 23;
    return float_of_bits(sign | ((size << 13) + rebias));
}

template <typename To>
BAPO_HD To number_at(const Numbers& numbers, int64_t row, int64_t column) {
    const int64_t at = row * numbers.row_stride + column * numbers.stride;
    const void* const data = numbers.data;
    switch (numbers.dtype) {
        case DType::kUInt8: return (To) static_cast<const uint8_t*>(data)[at];
        case DType::kInt8: return (To) static_cast<const int8_t*>(data)[at];
        case DType::kInt16: return (To) static_cast<const int16_t*>(data)[at];
        case DType::kInt32: return (To) static_cast<const int32_t*>(data)[at];
        case DType::kInt64: return (To) static_cast<const int64_t*>(data)[at];
        case DType::kFloat16: return (To)float_of_half(static_cast<const uint16_t*>(data)[at]);
        case DType::kBFloat16:
            return (To)float_of_bits((uint32_t)static_cast<const uint16_t*>(data)[at] << 16);
        case DType::kFloat32: return (To) static_cast<const float*>(data)[at];
        default: return (To) static_cast<const double*>(data)[at];
    }
}

// The offset at which sequence k of packed tokens begins, cut to the tokens that there are.
BAPO_HD int64_t offset_at(const Numbers& offsets, int64_t k, int64_t tokens) {
    const int64_t offset = number_at<int64_t>(offsets, 0, k);
    return offset < 0 ? 0 : (offset > tokens ? tokens : offset);
}
// Whether the k-th step of the offsets breaks their rule: they rise from 0 to at most N.
BAPO_HD bool offset_is_bad(const PrepareParams& params, int64_t k) {
    const int64_t offset = number_at<int64_t>(params.offsets, 0, k);
    const int64_t next =
        k < params.sequences ? number_at<int64_t>(params.offsets, 0, k + 1) : params.columns;
    return next < offset || (k == 0 && offset != 0);
}

// A token, and the sequence that it belongs to; behind the last one its index is their number.
struct Position {
    int64_t row, column, sequence;
};
BAPO_HD Position position_of(const PrepareParams& params, int64_t i) {
    const int64_t row = i / params.columns, column = i % params.columns;
    if (params.offsets.data == nullptr) return {row, column, row};
    int64_t low = 0, count = params.sequences;
    while (count > 0) {
        const int64_t half = count / 2;
        const bool ended = offset_at(params.offsets, low + half + 1, params.columns) <= column;
        low = ended ? low + half + 1 : low;
        count = ended ? count - half - 1 : half;
    }
    return {row, column, low};
}

BAPO_HD bool is_unmasked(const PrepareParams& params, Position at) {
    if (params.labels_given &&
        number_at<int64_t>(params.labels_or_log_probs, at.row, at.column) == kIgnoredLabel) {
        return false;
    }
    return params.response_mask.data == nullptr ||
           number_at<double>(params.response_mask, at.row, at.column) != 0.0;
}
BAPO_HD bool is_unmasked_and_inside(const PrepareParams& params, Position at) {
    return at.sequence < params.sequences && is_unmasked(params, at);
}

BAPO_HD double divisor_of(const PrepareParams& params, int64_t counted) {
    if (params.device_divisor.data == nullptr) {
        if (params.divisor == params.divisor) return params.divisor;
        return counted > 1 ? (double)counted : 1.0;
    }
    const double given = number_at<double>(params.device_divisor, 0, 0);
    return given > 0.0 && given < INFINITY ? given : NAN;
}

BAPO_HD bool bounds_are_valid(float lower, float upper) { return 0.0f <= lower && lower <= upper; }

// The factor of all weights; NaN if an input of the whole call breaks its rule.
BAPO_HD double shared_weight(const PrepareParams& params, const TokenCounts& counts) {
    const bool valid = !params.bounds || bounds_are_valid(params.bounds[0], params.bounds[1]);
    if (!valid || counts.bad_offsets) return NAN;
    switch (params.loss_agg_mode) {
        case LossAggMode::kTokenSum: return params.scale;
        case LossAggMode::kTokenMean: return params.scale / divisor_of(params, counts.tokens);
        default: return params.scale / divisor_of(params, counts.sequences);
    }
}

// Whether the weights depend on the sequences of the tokens.
BAPO_HD bool counts_sequences(const PrepareParams& params) {
    return params.weights != nullptr && params.loss_agg_mode != LossAggMode::kTokenMean &&
           params.loss_agg_mode != LossAggMode::kTokenSum;
}
// Whether the weights depend on counts of unmasked tokens, or the offsets have to be checked.
inline bool needs_counts(const PrepareParams& params) {
    if (params.offsets.data != nullptr) return true;
    if (params.weights == nullptr || params.loss_agg_mode == LossAggMode::kTokenSum) return false;
    if (params.loss_agg_mode == LossAggMode::kSeqMeanTokenMean) return true;
    return params.device_divisor.data == nullptr && params.divisor != params.divisor;
}

// Writes the flat inputs of a token. A mode that needs them has unmasked tokens in sequence_counts.
BAPO_HD void prepare_token(const PrepareParams& params, int64_t i, const TokenCounts& counts,
                           const int64_t* sequence_counts, double weight) {
    const Position at = position_of(params, i);
    // If offsets are bad, no token may hide behind the last one: the loss must become NaN.
    const bool unmasked =
        counts.bad_offsets ? is_unmasked(params, at) : is_unmasked_and_inside(params, at);
    params.unmasked[i] = unmasked;
    if (params.labels) {
        params.labels[i] = number_at<int64_t>(params.labels_or_log_probs, at.row, at.column);
    }
    const int64_t N = params.count(), last = params.sequences - 1;
    for (int k = 0; k < kFields; ++k) {
        const Numbers& field = params.fields[k];
        if (field.data == nullptr) continue;
        float value = params.per_sequence[k]
                          ? number_at<float>(field, 0, at.sequence < last ? at.sequence : last)
                          : number_at<float>(field, at.row, at.column);
        if (k == Field::advantages && counts.bad_offsets) value = NAN;
        params.tokens[k * N + i] = value;
    }
    if (params.counted) {
        params.counted[i] =
            unmasked && (!params.live || params.tokens[Field::advantages * N + i] != 0.0f);
    }
    if (params.weights == nullptr) return;
    if (params.loss_agg_mode == LossAggMode::kSeqMeanTokenMean && at.sequence < params.sequences) {
        const int64_t tokens = sequence_counts[at.sequence];
        weight /= tokens > 1 ? (double)tokens : 1.0;
    }
    if (params.loss_agg_mode == LossAggMode::kSeqMeanTokenSumNorm) {
        weight /= params.length;
    }
    const bool own_bounds = params.fields[Field::lower].data && params.fields[Field::upper].data;
    if (own_bounds && !bounds_are_valid(params.tokens[Field::lower * N + i],
                                        params.tokens[Field::upper * N + i])) {
        weight = NAN;
    }
    params.weights[i] = unmasked ? weight : 0.0;
}

}  // namespace bapo
