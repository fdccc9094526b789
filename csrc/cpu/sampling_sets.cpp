// Rows with a sampling mask: the values of their sets, the passes over these short rows, and the
// products with the head that they need; on row_pass.h and ../sampling_sets.h. Compiled once per
// instruction set (BAPO_ISA), with internal linkage, as in simd.h.

#include "sampling_sets.h"

#include "row_pass.h"

namespace {

// Terms that are summed in float32 before they are added to the sum of the others.
constexpr int64_t kTerms = 64;

template <typename T>
T* row_at(const Matrix& matrix, int64_t row) {
    return static_cast<T*>(matrix.data) + row * matrix.row_stride;
}

// Kernels write in the dtype of what they read, or in float32.
template <typename F>
void with_dtypes(DType in, DType out, F f) {
    with_dtype(in, [&]<typename T>(T) { out == in ? f(T{}, T{}) : f(T{}, float{}); });
}

template <typename T>
VFloat load_or_zero(const T* p, int64_t count) {
    if (count >= kLanes) return load(p);
    T buffer[kLanes] = {};
    std::memcpy(buffer, p, (count > 0 ? count : 0) * sizeof(T));
    return load(buffer);
}

// ---- between rows of logits and values of sets -----------------------------------------------

template <typename T>
void gather_row(const MoveSetsParams& params, int64_t index) {
    if (!params.counted[index]) return;
    const SetOfRow set = set_of(params.sets, index);
    const T* const logits = params.rows.logits_at<T>(index);
    for (int64_t k = set.begin; k < set.begin + set.size; ++k) {
        const int64_t column = column_of(params.sets, params.columns, set, k);
        params.values[k] = column < 0 ? value_without_column(column) : load_scalar(logits + column);
    }
}

template <typename T>
void scatter_row(const MoveSetsParams& params, int64_t index) {
    if (!params.counted[index]) return;
    const SetOfRow set = set_of(params.sets, index);
    T* const grad = params.rows.grad_at<T>(index);
    for (int64_t k = set.begin; k < set.begin + set.size; ++k) {
        const int64_t column = column_of(params.sets, params.columns, set, k);
        if (column >= 0) store_scalar(grad + column, params.values[k]);
    }
}

// ---- passes over the values ------------------------------------------------------------------

template <bool kSoftcap>
void pass_set(const RowPassParams& params, int64_t index) {
    const SetOfRow set = set_of(params.rows.sets, index);
    if (params.undecided) params.undecided[index] = 0;
    if (set.absent()) return;
    RowPassParams row = params;
    row.rows = row_of_set(params.rows, set);
    pass_row<float, kSoftcap>(row, index, log_prob_without_position);
}

template <bool kSoftcap, bool kSampled>
void finish_set(const RowGradientParams& params, int64_t index) {
    const SetOfRow set = set_of(params.rows.sets, index);
    if (set.absent()) return;
    RowGradientParams row = params;
    row.rows = row_of_set(params.rows, set);
    finish_row<float, kSoftcap, kSampled>(row, index);
}

// ---- products with the head ------------------------------------------------------------------

// Products of a hidden state with some rows of the head, while those that follow are fetched.
constexpr int kTogether = 4;
template <typename T>
void multiply_rows(const T* hidden, const T* const (&rows)[kTogether],
                   const T* const (&next)[kTogether], int64_t H, float (&products)[kTogether]) {
    constexpr int64_t kLine = 64 / sizeof(T);
    VFloat even[kTogether] = {}, odd[kTogether] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= H; i += 2 * kLanes) {
        const VFloat h0 = load(hidden + i), h1 = load(hidden + i + kLanes);
        for (int r = 0; r < kTogether; ++r) {
            for (int64_t line = 0; line < 2 * kLanes; line += kLine) {
                __builtin_prefetch(next[r] + i + line);
            }
            even[r] += h0 * load(rows[r] + i);
            odd[r] += h1 * load(rows[r] + i + kLanes);
        }
    }
    for (; i < H; i += kLanes) {
        const VFloat h = load_or_zero(hidden + i, H - i);
        for (int r = 0; r < kTogether; ++r) even[r] += h * load_or_zero(rows[r] + i, H - i);
    }
    for (int r = 0; r < kTogether; ++r) {
        products[r] = (float)(reduce_add(even[r]) + reduce_add(odd[r]));
    }
}

template <typename T>
void multiply_row(const MultiplySetsParams& params, int64_t index) {
    const auto& [head, sets, columns, counted, values] = params;
    if (!counted[index]) return;
    const SetOfRow set = set_of(sets, index);
    const int64_t H = head.hidden.columns, end = set.begin + set.size;
    const T* const hidden = row_at<const T>(head.hidden, index);
    struct Group {
        int64_t column[kTogether];
        const T* row[kTogether];
    };
    // An id without a column reads the hidden state instead.
    const auto group_at = [&](int64_t begin) {
        Group group;
        for (int r = 0; r < kTogether; ++r) {
            const int64_t k = begin + r;
            group.column[r] = k < end ? column_of(params.sets, params.columns, set, k) : kElsewhere;
            group.row[r] =
                group.column[r] < 0 ? hidden : row_at<const T>(params.head.weight, group.column[r]);
        }
        return group;
    };
    Group group = group_at(set.begin);
    for (int64_t begin = set.begin; begin < end; begin += kTogether) {
        const Group next = group_at(begin + kTogether);
        float products[kTogether];
        multiply_rows(hidden, group.row, next.row, H, products);
        for (int r = 0; r < kTogether && begin + r < end; ++r) {
            const int64_t column = group.column[r];
            const float bias = column >= 0 && head.bias ? head.bias[column] : 0.0f;
            values[begin + r] = column < 0 ? value_without_column(column) : products[r] + bias;
        }
        group = next;
    }
}

// How a sum goes to memory; streamed ones go past the cache, as they are not read again soon.
enum class Store { kWritten, kStreamed, kAdded };

template <typename T>
struct Term {
    float factor;  // 0: the row is not read
    const T* row;
};

// sum += factor*row over kCount terms, while kFetched rows are fetched.
template <int kCount, int kFetched, typename T>
void add_terms(float* sum, int64_t width, const Term<T>* terms, const Term<T>* next) {
    const auto add = [&](int64_t at, auto load_row) {
        VFloat added = terms[0].factor * load_row(terms[0].row + at);
        for (int r = 1; r < kCount; ++r) added += terms[r].factor * load_row(terms[r].row + at);
        store(sum + at, load(sum + at) + added);
    };
    int64_t at = 0;
    for (; at + kLanes <= width; at += kLanes) {
        for (int r = 0; r < kFetched; ++r) __builtin_prefetch(next[r].row + at);
        add(at, [](const T* p) { return load(p); });
    }
    if (at < width) add(at, [&](const T* p) { return load_or_zero(p, width - at); });
}

thread_local Buffer row_sums;

// Stores the sum of factor*row over the terms, a few whole rows after the others. term(i) gives
// both.
template <typename T, typename Out, typename F>
void weighted_sum(Out* out, int64_t width, int64_t count, Store how, F term) {
    const int64_t size = (width + kLanes - 1) / kLanes * kLanes;
    float* const sum = row_sums.of(2 * size);  // of kTerms at most; then the sum of these
    float* const total = sum + size;
    std::memset(sum, 0, 2 * size * sizeof(float));
    int64_t i = 0, added = 0;
    const auto take = [&](Term<T>* terms) {
        int taken = 0;
        for (; taken < kTogether && i < count; ++i) {
            terms[taken] = term(i);
            taken += terms[taken].factor != 0.0f;
        }
        return taken;
    };
    Term<T> given[kTogether], next[kTogether];
    for (int taken = take(given); taken > 0;) {
        const int following = take(next);
        if (following == kTogether) {
            add_terms<kTogether, kTogether>(sum, width, given, next);
        } else if (taken == kTogether) {
            add_terms<kTogether, 0>(sum, width, given, next);
        } else {
            for (int r = 0; r < taken; ++r) add_terms<1, 0>(sum, width, given + r, next);
        }
        added += taken;
        if (added % kTerms == 0 || following == 0) {
            for (int64_t at = 0; at < size; at += kLanes) {
                store(total + at, load(total + at) + load(sum + at));
                store(sum + at, VFloat{});
            }
        }
        std::memcpy(given, next, sizeof given);
        taken = following;
    }
    const auto total_at = [&](int64_t at, int64_t) { return load_or_zero(total + at, width - at); };
    if (how == Store::kAdded) {
        return fill_row(out, width, false, [&](int64_t at, int64_t left) {
            return total_at(at, left) + load_or_zero(out + at, width - at);
        });
    }
    fill_row(out, width, how == Store::kStreamed, total_at);
}

template <typename T, typename Out>
void dhidden_of_row(const SetHiddenGradientParams& params, int64_t index) {
    if (params.only && !params.only[index]) return;
    const SetOfRow set = set_of(params.sets, index);
    if (set.size == 0) return;
    const auto term = [&](int64_t i) {
        const int64_t k = set.begin + i, column = column_of(params.sets, params.columns, set, k);
        if (column < 0) return Term<T>{0.0f, nullptr};
        return Term<T>{params.dvalues[k], row_at<const T>(params.weight, column)};
    };
    weighted_sum<T>(row_at<Out>(params.dhidden, index), params.dhidden.columns, set.size,
                    Store::kWritten, term);
}

template <typename T, typename Out, bool kSoftcap>
void pass_head_row(const HeadSetPassParams& params, int64_t index) {
    const auto& [pass, head, dhidden] = params;
    const Sets& sets = pass.rows.sets;
    const Columns columns{head.weight.rows, nullptr};
    float* const values = pass.rows.dvalues();
    multiply_row<T>({head, sets, columns, pass.tokens.counted, values}, index);
    pass_set<kSoftcap>(pass, index);
    if (pass.undecided[index]) return;
    dhidden_of_row<T, Out>({head.weight, sets, columns, values, nullptr, dhidden}, index);
}

// Takes columns [begin, end); neighbours without a value are filled with zeros at once.
template <typename T, typename Out>
void dweight_of_columns(const SetWeightGradientParams& params, int64_t begin, int64_t end) {
    const auto start_of = [&](int64_t column) {
        const int64_t start = params.segments[column];
        return start < 0 ? 0 : (start > params.count ? params.count : start);
    };
    const Matrix& dweight = params.dweight;
    for (int64_t column = begin, empty = begin; column <= end; ++column) {
        const int64_t start = column < end ? start_of(column) : 0;
        const int64_t terms = column < end ? start_of(column + 1) - start : 0;
        if (column < end && terms <= 0) continue;
        for (int64_t at = empty; at < column && !params.add; ++at) {
            const bool packed = dweight.row_stride == dweight.columns;
            const int64_t rows = packed ? column - at : 1;
            fill_row(row_at<Out>(dweight, at), rows * dweight.columns, true,
                     [](int64_t, int64_t) { return VFloat{}; });
            at += rows - 1;
        }
        empty = column + 1;
        if (column == end) break;
        const auto place = [&](int64_t i) {
            const int64_t at = params.order[start + i];
            return at < 0 || at >= params.count ? nullptr : params.dvalues + at;
        };
        weighted_sum<T>(row_at<Out>(dweight, column), dweight.columns, terms,
                        params.add ? Store::kAdded : Store::kStreamed, [&](int64_t i) {
                            const float* const factor = place(i);
                            const int64_t row = params.rows[start + i];
                            const bool known = factor && row >= 0 && row < params.hidden.rows;
                            if (!known) return Term<T>{0.0f, nullptr};
                            return Term<T>{*factor, row_at<const T>(params.hidden, row)};
                        });
        if (params.dbias == nullptr) continue;
        double sum = 0.0;
        for (int64_t i = 0; i < terms; ++i) sum += place(i) ? *place(i) : 0.0f;
        params.dbias[column] += (float)sum;
    }
    stream_fence();
}

// ---- launches --------------------------------------------------------------------------------

void gather(const MoveSetsParams& params, cpu::RowQueue& queue) {
    with_dtype(params.rows.dtype, [&]<typename T>(T) { take_rows(params, queue, gather_row<T>); });
}
void scatter(const MoveSetsParams& params, cpu::RowQueue& queue) {
    with_dtype(params.rows.dtype, [&]<typename T>(T) { take_rows(params, queue, scatter_row<T>); });
}
void multiply(const MultiplySetsParams& params, cpu::RowQueue& queue) {
    with_dtype(params.head.hidden.dtype,
               [&]<typename T>(T) { take_rows(params, queue, multiply_row<T>); });
}
void pass(const RowPassParams& params, cpu::RowQueue& queue) {
    with_softcap(params.rows.transform,
                 [&]<bool kSoftcap>() { take_rows(params, queue, pass_set<kSoftcap>); });
}
void head_pass(const HeadSetPassParams& params, cpu::RowQueue& queue) {
    with_dtypes(params.head.hidden.dtype, params.dhidden.dtype,
                [&]<typename T, typename Out>(T, Out) {
                    with_softcap(params.pass.rows.transform, [&]<bool kSoftcap>() {
                        take_rows(params, queue, pass_head_row<T, Out, kSoftcap>);
                    });
                });
}
void gradient(const RowGradientParams& params, cpu::RowQueue& queue) {
    with_softcap(params.rows.transform, [&]<bool kSoftcap>() {
        take_rows(params, queue,
                  params.drawn ? finish_set<kSoftcap, true> : finish_set<kSoftcap, false>);
    });
}
void dhidden(const SetHiddenGradientParams& params, cpu::RowQueue& queue) {
    with_dtypes(params.weight.dtype, params.dhidden.dtype, [&]<typename T, typename Out>(T, Out) {
        take_rows(params, queue, dhidden_of_row<T, Out>);
    });
}

void dweight(const SetWeightGradientParams& params, cpu::RowQueue& queue) {
    with_dtypes(params.hidden.dtype, params.dweight.dtype, [&]<typename T, typename Out>(T, Out) {
        for (int64_t begin; (begin = queue.next.fetch_add(queue.grain)) < queue.count;) {
            const int64_t end = begin + queue.grain;
            dweight_of_columns<T, Out>(params, begin, end < queue.count ? end : queue.count);
        }
    });
}

}  // namespace

namespace bapo::cpu {
extern const SetKernels BAPO_CONCAT(kSetKernels_, BAPO_ISA);
const SetKernels BAPO_CONCAT(kSetKernels_, BAPO_ISA){
    ::gather, ::scatter, ::multiply, ::pass, ::head_pass, ::gradient, ::dhidden, ::dweight};
}  // namespace bapo::cpu
