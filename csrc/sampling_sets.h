// The set of a row, and the columns of its ids, for the kernels of every device; on params.h.
// Values that break a rule are found here: elsewhere foreign memory would be read or written.
#pragma once

#include "params.h"

namespace bapo {

// The positions of labels that are not in their set.
constexpr int64_t kOutsideOfSet = -1;
constexpr int64_t kNoToken = -2;

// The set of a row: [begin, begin + size). Its size is 0 if it is absent, or broken: if the offsets
// break their rule, the log-prob of the row is NaN.
struct SetOfRow {
    int64_t begin;
    int64_t size;
    bool broken;
    BAPO_HD bool absent() const { return size == 0 && !broken; }
};
BAPO_HD SetOfRow set_of(const Sets& sets, int64_t row) {
    const int64_t begin = sets.offsets[row], end = sets.offsets[row + 1];
    const bool whole = sets.offsets[0] == 0 && sets.offsets[sets.rows] == sets.count;
    if (!whole || begin < 0 || begin > end || end > sets.count) return {0, 0, true};
    return {begin, end - begin, false};
}

// Its values as a row of logits.
BAPO_HD LogitRows row_of_set(const LogitRows& rows, const SetOfRow& set) {
    LogitRows row = rows;  // without strides, so that every index is this row
    row.vocab = set.size;
    row.logits = rows.values() + set.begin;
    row.grad = rows.grad == nullptr ? nullptr : rows.dvalues() + set.begin;
    return row;
}

// The column here of an id; of another rank, or of an id that breaks its rule: none.
constexpr int64_t kElsewhere = -1;
constexpr int64_t kBrokenId = -2;
BAPO_HD int64_t column_of(const Sets& sets, const Columns& columns, const SetOfRow& set,
                          int64_t k) {
    const int64_t id = sets.token_ids[k];
    const int64_t first = columns.shard ? columns.shard[0] : 0;
    const int64_t total = columns.shard ? columns.shard[1] : columns.count;
    const bool ascends = k == set.begin || sets.token_ids[k - 1] < id;
    if (id < 0 || id >= total || !ascends) return kBrokenId;
    const int64_t column = id - first;
    return column >= 0 && column < columns.count ? column : kElsewhere;
}
// The value of an id that has no column here.
BAPO_HD float value_without_column(int64_t column) { return column == kBrokenId ? NAN : -INFINITY; }

BAPO_HD int64_t position_of_label(const FindLabelsParams& params, const SetOfRow& set,
                                  int64_t label) {
    if (label == kIgnoredLabel) return label;
    if (label < 0 || label >= params.vocab || set.broken) return kNoToken;
    int64_t low = 0, count = set.size;
    while (count > 0) {
        const int64_t half = count / 2;
        const bool below = params.sets.token_ids[set.begin + low + half] < label;
        low = below ? low + half + 1 : low;
        count = below ? count - half - 1 : half;
    }
    const bool found = low < set.size && params.sets.token_ids[set.begin + low] == label;
    return found ? low : kOutsideOfSet;
}
// One of the labels of all rows, if its row has a set.
BAPO_HD void find_label(const FindLabelsParams& params, int64_t i) {
    const SetOfRow set = set_of(params.sets, i / params.labels_per_row);
    if (set.absent()) return;
    params.positions[i] = position_of_label(params, set, params.labels[i]);
}

// The log-prob of a label that has no position in its set.
BAPO_HD double log_prob_without_position(int64_t position) {
    return position == kOutsideOfSet ? -(double)INFINITY : (double)NAN;
}

}  // namespace bapo
