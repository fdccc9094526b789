// Products with the rows of the head that sampling masks name, and their gradients. A segment is
// the ids of a set or the occurrences of a column. Blocks share a long one in pieces, which must
// depend on its size alone, as the bits of its sums do.

#include <algorithm>

#include "dispatch.cuh"
#include "launch_cuda.h"
#include "sampling_set_row.cuh"

namespace bapo::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 4;         // of a multiprocessor, which leaves a thread 128 registers
constexpr int kSumBlocks = 5;      // and 96
constexpr int kAtOnce = 4;         // rows of the head by which a warp multiplies at once
constexpr int kParts = 2;          // blocks that multiply by one piece
constexpr int64_t kPiece = 256;    // terms at least
constexpr int kManyBlocks = 4096;  // fill every GPU more than once

template <typename T>
__device__ T* row_of(const Matrix& matrix, int64_t row) {
    return static_cast<T*>(matrix.data) + row * matrix.row_stride;
}

// The number of pieces of equal size of a segment; 0 if it is short, and stays whole.
BAPO_HD int64_t pieces_of(int64_t terms) { return terms < 2 * kPiece ? 0 : terms / kPiece; }

// The last of ascending offsets that is no larger than this.
__device__ int64_t last_up_to(int64_t most, const int64_t* offsets, int64_t count) {
    int64_t found = 0, step = 1;
    while (step * kWarp < count) step *= kWarp;
    for (; step > 0; step /= kWarp) {
        const int64_t at = found + threadIdx.x % kWarp * step;
        const uint32_t lanes = __ballot_sync(kAllLanes, at < count && offsets[at] <= most);
        found += max(__popc(lanes) - 1, 0) * step;
    }
    return found;
}

// Terms [first, end) of a segment.
struct Piece {
    int64_t segment = -1;  // none
    SetOfRow whole{};
    int64_t first = 0, end = 0;
};
__device__ int64_t start_of(int64_t piece, const SetOfRow& whole) {
    return piece * whole.size / pieces_of(whole.size);
}
template <typename Segments>
__device__ Piece short_segment(int64_t segment, const Segments& segments) {
    const SetOfRow whole = segments.at(segment);
    return pieces_of(whole.size) > 0 ? Piece{} : Piece{segment, whole, 0, whole.size};
}
// The first items are short segments. The others are windows of kPiece terms of all segments: an
// item is the piece of a long segment that has the last term of its window.
template <typename Segments>
__device__ Piece piece_of(int64_t item, const Segments& segments) {
    if (item < segments.count) return short_segment(item, segments);
    const int64_t last = (item - segments.count + 1) * kPiece - 1;
    const int64_t segment = last_up_to(last, segments.offsets, segments.count);
    if (segment >= segments.count) return {};
    const SetOfRow whole = segments.at(segment);
    const int64_t pieces = pieces_of(whole.size), place = last - whole.begin;
    if (pieces == 0 || place < 0) return {};
    const int64_t piece = ((place + 1) * pieces - 1) / whole.size, first = start_of(piece, whole);
    if (piece >= pieces || place - first >= kPiece) return {};
    return {segment, whole, first, start_of(piece + 1, whole)};
}

struct SegmentsOfSets {
    const int64_t* offsets;
    int64_t count;
    Sets sets;
    __device__ SetOfRow at(int64_t row) const { return set_of(sets, row); }
};

// Each warp takes kAtOnce ids of a piece in turn, and loads all vectors of kSteps before it uses
// one.
template <typename T, bool kAligned>
__device__ void multiply(const MultiplySetsParams& params, const Piece& piece, int part) {
    constexpr int n = kVec<T>, kStride = kWarp * n, kSteps = kAligned ? 4 : 1;
    const SetHead& head = params.head;
    const int lane = threadIdx.x % kWarp, warp = part * kWarps + (int)threadIdx.x / kWarp;
    const int H = (int)head.hidden.columns, whole = H / n * n;
    const T* const hidden = row_of<const T>(head.hidden, piece.segment);
    for (int64_t first = piece.first + warp * kAtOnce; first < piece.end;
         first += kParts * kWarps * kAtOnce) {
        const int64_t k = piece.whole.begin + first + lane;
        const bool mine = lane < kAtOnce && first + lane < piece.end;
        const int64_t column =
            mine ? column_of(params.sets, params.columns, piece.whole, k) : kElsewhere;
        const T* rows[kAtOnce];
        float sums[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t head_row = __shfl_sync(kAllLanes, column, i);
            // An id without a column reads the hidden state instead.
            rows[i] = head_row >= 0 ? row_of<const T>(head.weight, head_row) : hidden;
        }
        const auto add_product = [&](uint4 hidden_raw, uint4 weight_raw, int i) {
            float x[n], w[n];
            unpack(hidden_raw, x, T{});
            unpack(weight_raw, w, T{});
            float sum = x[0] * w[0];
#pragma unroll
            for (int j = 1; j < n; ++j) sum = fmaf(x[j], w[j], sum);
            sums[i] += sum;
        };
        for (int h = lane * n; h < whole; h += kSteps * kStride) {
            uint4 hidden_raw[kSteps] = {}, raw[kSteps][kAtOnce] = {};
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                if (h + s * kStride >= whole) continue;
                hidden_raw[s] = load_vector<T, kAligned>(hidden + h + s * kStride);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    raw[s][i] = load_vector<T, kAligned>(rows[i] + h + s * kStride);
                }
            }
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) add_product(hidden_raw[s], raw[s][i], i);
            }
        }
        if (whole < H && lane == whole / n % kWarp) {
            const uint4 hidden_raw = load_elements<T, kAligned>(hidden, whole, H, 0.0f);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                add_product(hidden_raw, load_elements<T, kAligned>(rows[i], whole, H, 0.0f), i);
            }
        }
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            add_lanes(sums[i]);
            if (lane == i) value = sums[i];
        }
        if (!mine) continue;
        if (head.bias && column >= 0) value += head.bias[column];
        params.values[k] = column >= 0 ? value : value_without_column(column);
    }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    multiply_sets_kernel(const __grid_constant__ MultiplySetsParams params) {
    const SegmentsOfSets sets{params.sets.offsets, params.sets.rows, params.sets};
    const Piece piece = piece_of(blockIdx.x / kParts, sets);
    if (piece.end == 0 || !params.counted[piece.segment]) return;
    multiply<T, kAligned>(params, piece, (int)(blockIdx.x % kParts));
}

// Writes elements, or adds them to what is there, with one rounding.
template <typename T, int n>
__device__ void store(const float (&values)[n], bool add, T* to, int count) {
    if constexpr (n % kVec<T> == 0) {
        if (count >= n && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
            for (int i = 0; i < n; i += kVec<T>) {
                auto* const vector = reinterpret_cast<uint4*>(to + i);
                float sum[kVec<T>] = {};
                if (add) unpack(*vector, sum, T{});
#pragma unroll
                for (int j = 0; j < kVec<T>; ++j) sum[j] += values[i + j];
                *vector = pack(sum, T{});
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
        if (i < count) to[i] = from_float<T>(add ? to_float(to[i]) + values[i] : values[i]);
    }
}
template <int n>
__device__ void store(const float (&values)[n], bool add, const Matrix& to, int64_t row, int h) {
    const int count = (int)to.columns - h;
    switch (to.dtype) {
        case DType::kBFloat16: return store(values, add, row_of<__nv_bfloat16>(to, row) + h, count);
        case DType::kFloat16: return store(values, add, row_of<__half>(to, row) + h, count);
        default: return store(values, add, row_of<float>(to, row) + h, count);
    }
}

// The sum of factor*row over the terms of each segment.
struct Sums {
    const int64_t* offsets;
    int64_t count;
    Matrix rows, to;
    bool add;
    float* dbias;  // gets the sums of the factors
};
struct alignas(8) Term {
    int32_t row;
    float factor;
};

// Sums rows of the head over the ids of sets.
struct HiddenSums : Sums {
    static constexpr bool kMany = false;
    SetHiddenGradientParams params;
    bool flag;  // the value of params.only at rows to write

    __device__ SetOfRow at(int64_t row) const { return set_of(params.sets, row); }
    __device__ bool wants(const Piece& piece) const {
        return piece.end > 0 && (!params.only || (params.only[piece.segment] != 0) == flag);
    }
    __device__ Term term(const SetOfRow& set, int64_t i) const {
        const float factor = params.dvalues[set.begin + i];
        const int64_t column = column_of(params.sets, params.columns, set, set.begin + i);
        return {(int32_t)column, column < 0 ? 0.0f : factor};
    }
};

// Sums hidden states over the occurrences of columns.
struct WeightSums : Sums {
    // Whether a block takes up to 32 segments, and writes zeros where they are empty, as most are.
    static constexpr bool kMany = true;
    SetWeightGradientParams params;

    __device__ SetOfRow at(int64_t column) const {
        const auto within = [&](int64_t i) { return i < 0 ? 0 : min(i, params.count); };
        const int64_t begin = within(params.segments[column]);
        return {begin, max(within(params.segments[column + 1]), begin) - begin, false};
    }
    __device__ bool wants(const Piece& piece) const { return piece.end > 0; }
    __device__ Term term(const SetOfRow& segment, int64_t i) const {
        const int64_t k = params.order[segment.begin + i];
        const int32_t row = params.rows[segment.begin + i];
        const bool inside = k >= 0 && k < params.count && row >= 0 && row < params.hidden.rows;
        return {row, inside ? params.dvalues[k] : 0.0f};
    }
};

// Adds factor*row of terms 0..count-1 to `total`, in this order and 32 at a time, in elements
// [h, h + n) of each lane. Calls term(i) once, and reads no row whose factor is 0. Returns the sum
// of the factors if h is 0.
template <typename T, bool kAligned, typename F>
__device__ float sum_rows(const Matrix& rows, int count, int h, F term, float (&total)[kVec<T>]) {
    __shared__ Term terms_of_block[kWarps][kWarp];
    constexpr int n = kVec<T>, kBranch = 4;
    const int lane = threadIdx.x % kWarp, H = (int)rows.columns;
    Term* const terms = terms_of_block[threadIdx.x / kWarp];
    float factors = 0.0f;
    for (int done = 0; done < count; done += kWarp) {
        Term mine{0, 0.0f};
        if (done + lane < count) mine = term(done + lane);
        factors += mine.factor;
        const bool has_factor = mine.factor != 0.0f;
        const uint32_t lanes = __ballot_sync(kAllLanes, has_factor);
        if (has_factor) shared_store(&terms[__popc(lanes & ((1u << lane) - 1))], mine);
        __syncwarp();
        float sum[n] = {};
        const int present = __popc(lanes);
        // All of kLoads rows are loaded before the first is used, too many by less than kBranch.
        const auto add_rows = [&]<int kLoads>(auto load) {
            for (int i = 0; i < present; i += kLoads) {
                uint4 raw[kLoads];
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    if (i + j / kBranch * kBranch >= present) break;
                    const int32_t row = shared_load(&terms[min(i + j, present - 1)].row);
                    raw[j] = load(row_of<const T>(rows, row));
                }
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    if (i + j >= present) break;
                    const float factor = shared_load(&terms[i + j].factor);
                    float x[n];
                    unpack(raw[j], x, T{});
#pragma unroll
                    for (int e = 0; e < n; ++e) sum[e] = fmaf(factor, x[e], sum[e]);
                }
            }
        };
        if (h + n <= H) {
            add_rows.template operator()<kAligned ? 8 : kBranch>(
                [&](const T* from) { return load_vector<T, kAligned>(from + h); });
        } else if (h < H) {
            add_rows.template operator()<2>(
                [&](const T* from) { return load_elements<T, kAligned>(from, h, H, 0.0f); });
        }
#pragma unroll
        for (int e = 0; e < n; ++e) total[e] += sum[e];
        __syncwarp();  // before the terms are overwritten
    }
    if (h >= kWarp * n) return 0.0f;
    add_lanes(factors);
    return factors;
}

// A block takes a slice of short segments or of a piece. Its segments lie apart, because those of
// frequent tokens are long, and neighbours. The sum of a piece goes to `parts`, whose last vector
// begins with the sum of the factors.
template <typename T, bool kAligned, typename Of>
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    sets_sum_kernel(const __grid_constant__ Of sums, Matrix parts, int64_t blocks, int slices) {
    const int h = ((int)(blockIdx.x % slices) * kThreads + (int)threadIdx.x) * kVec<T>;
    const int64_t block = blockIdx.x / slices, mine = block + threadIdx.x % kWarp * blocks;
    const int64_t window = block - blocks;
    const auto segment = [&](uint32_t lanes) { return block + (__ffs(lanes) - 1) * blocks; };
    Piece own;
    if (window < 0 && mine < sums.count) own = short_segment(mine, sums);
    if constexpr (Of::kMany) {
        const bool is_empty = !sums.add && own.segment >= 0 && own.end == 0;
        const float zeros[kVec<T>] = {};
        for (uint32_t i = __ballot_sync(kAllLanes, is_empty); i != 0; i &= i - 1) {
            store(zeros, false, sums.to, segment(i), h);
        }
    }
    const bool is_wanted = window < 0 ? sums.wants(own) : threadIdx.x % kWarp == 0;
    for (uint32_t i = __ballot_sync(kAllLanes, is_wanted); i != 0; i &= i - 1) {
        const Piece piece = piece_of(window < 0 ? segment(i) : sums.count + window, sums);
        if (!sums.wants(piece)) return;
        const auto term = [&](int i) { return sums.term(piece.whole, piece.first + i); };
        float total[kVec<T>] = {};
        const int count = (int)(piece.end - piece.first);
        const float factors = sum_rows<T, kAligned>(sums.rows, count, h, term, total);
        if (window < 0) {
            store(total, sums.add, sums.to, piece.segment, h);
            if (h == 0 && sums.dbias) sums.dbias[piece.segment] += factors;
        } else {
            store(total, false, parts, window, h);
            if (h == 0) row_of<float>(parts, window + 1)[-kVec<float>] = factors;
        }
    }
}

// Adds the parts of each long segment, in the block of its first one.
template <typename Of>
__global__ void __launch_bounds__(kThreads, kSumBlocks)
    sets_parts_kernel(const __grid_constant__ Of sums, Matrix parts, int slices) {
    const int h = ((int)(blockIdx.x % slices) * kThreads + (int)threadIdx.x) * kVec<float>;
    const int64_t window = blockIdx.x / slices;
    const Piece piece = piece_of(sums.count + window, sums);
    if (piece.first > 0 || !sums.wants(piece)) return;
    const auto term = [&](int i) {
        return Term{(int32_t)((piece.whole.begin + start_of(i, piece.whole)) / kPiece), 1.0f};
    };
    parts.columns = parts.row_stride;
    float total[kVec<float>] = {};
    sum_rows<float, true>(parts, (int)pieces_of(piece.whole.size), h, term, total);
    store(total, sums.add, sums.to, piece.segment, h);
    if (h + kVec<float> == parts.columns && sums.dbias) sums.dbias[piece.segment] += total[0];
}

// Calls f.operator()<T, kAligned>() for rows that are read from these.
template <typename F, typename... Matrices>
auto with_rows(F f, const Matrix& matrix, const Matrices&... more) {
    const auto is_aligned = [](const Matrix& rows) {
        return aligned(rows.data, rows.dtype, rows.rows, rows.row_stride);
    };
    const bool all = (is_aligned(matrix) && ... && is_aligned(more));
    return with_dtype(matrix.dtype, [&]<typename T>() {
        return all ? f.template operator()<T, true>() : f.template operator()<T, false>();
    });
}

int slices_of(int64_t columns, int n) {
    return std::max(1, (int)((columns + kThreads * n - 1) / (kThreads * n)));
}
// Elements of the sums of a piece: vectors, and another.
int64_t part_stride(int64_t columns) { return (columns + 7) / 4 * 4; }
int64_t part_words(int64_t terms, int64_t columns) {
    return pieces_of(terms) * part_stride(columns) / 2;
}

template <typename Of>
const char* sum(const Of& sums, int64_t terms, double* memory, void* stream) {
    const int64_t pieces = pieces_of(terms), H = sums.to.columns, stride = part_stride(H);
    const Matrix parts{DType::kFloat32, pieces, H, memory, stride};
    const auto run = [&]<typename T, bool kAligned>() {
        const int slices = slices_of(H, kVec<T>);
        const int64_t least = Of::kMany ? (sums.count + kWarp - 1) / kWarp : sums.count;
        const int64_t blocks = std::max(least, std::min<int64_t>(sums.count, kManyBlocks / slices));
        return launch(sets_sum_kernel<T, kAligned, Of>, (blocks + pieces) * slices, kThreads,
                      stream, sums, parts, blocks, slices);
    };
    if (const char* const error = with_rows(run, sums.rows)) return error;
    const int slices = slices_of(stride, kVec<float>);
    return launch(sets_parts_kernel<Of>, pieces * slices, kThreads, stream, sums, parts, slices);
}

HiddenSums sums_of(const SetHiddenGradientParams& params, bool flag) {
    const auto& [weight, sets, columns, dvalues, only, dhidden] = params;
    return {{sets.offsets, sets.rows, weight, dhidden, false, nullptr}, params, flag};
}

}  // namespace

int64_t scratch_words(const HeadSetPassParams& params) {
    return part_words(params.pass.rows.sets.count, params.dhidden.columns);
}
int64_t scratch_words(const SetHiddenGradientParams& params) {
    return part_words(params.sets.count, params.dhidden.columns);
}
int64_t scratch_words(const SetWeightGradientParams& params) {
    return part_words(params.count, params.dweight.columns);
}

const char* multiply_sets(const MultiplySetsParams& params, void* stream) {
    const int64_t items = params.sets.rows + pieces_of(params.sets.count);
    const auto run = [&]<typename T, bool kAligned>() {
        return launch(multiply_sets_kernel<T, kAligned>, items * kParts, kThreads, stream, params);
    };
    return with_rows(run, params.head.hidden, params.head.weight);
}

// Three kernels: in one, a long set would occupy one block alone.
const char* head_sets_pass(const HeadSetPassParams& params, double* parts, void* stream) {
    const auto& [pass, head, dhidden] = params;
    const Sets& sets = pass.rows.sets;
    const Columns columns{head.weight.rows, nullptr};
    float* const values = pass.rows.dvalues();
    const char* error = multiply_sets({head, sets, columns, pass.tokens.counted, values}, stream);
    if (!error) error = sets_pass(pass, stream);
    const auto sums = sums_of({head.weight, sets, columns, values, pass.undecided, dhidden}, false);
    return error ? error : sum(sums, sets.count, parts, stream);
}

const char* sets_dhidden(const SetHiddenGradientParams& params, double* parts, void* stream) {
    return sum(sums_of(params, true), params.sets.count, parts, stream);
}

const char* sets_dweight(const SetWeightGradientParams& params, double* parts, void* stream) {
    const auto& [dvalues, count, hidden, order, rows, segments, add, dweight, dbias] = params;
    const WeightSums sums{{segments, dweight.rows, hidden, dweight, add, dbias}, params};
    return sum(sums, count, parts, stream);
}

}  // namespace bapo::cuda
