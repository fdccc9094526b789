// Entry points of the CPU kernels, on params.h and tokens.h; no torch.
// A launch is cut into pieces of work that any thread may take in any order; results do not depend
// on which thread took which piece.
#pragma once

#include <atomic>
#include <cstdint>

#include "params.h"
#include "tokens.h"

namespace bapo::cpu {

// Threads take rows, a grain of neighbours at a time, until none is left. If two threads were the
// first to touch a page, both would pay for it.
struct RowQueue {
    int64_t count;
    int64_t grain;
    std::atomic<int64_t> next{0};
};

// Rows to multiply by a factor, in place.
struct ScaleParams {
    LogitRows rows;
    float factor;
};

// Kernels of rows with a sampling mask; dweight takes columns instead.
struct SetKernels {
    void (*gather)(const MoveSetsParams&, RowQueue&);
    void (*scatter)(const MoveSetsParams&, RowQueue&);
    void (*multiply)(const MultiplySetsParams&, RowQueue&);
    void (*pass)(const RowPassParams&, RowQueue&);
    void (*head_pass)(const HeadSetPassParams&, RowQueue&);
    void (*gradient)(const RowGradientParams&, RowQueue&);
    void (*dhidden)(const SetHiddenGradientParams&, RowQueue&);
    void (*dweight)(const SetWeightGradientParams&, RowQueue&);
};

struct RowKernels {
    const char* isa;
    void (*row_pass)(const RowPassParams&, RowQueue&);
    void (*row_gradient)(const RowGradientParams&, RowQueue&);
    void (*scale)(const ScaleParams&, RowQueue&);
    void (*sample)(const SampleParams&, RowQueue&);
    const SetKernels& sets;
};
// The widest instruction set that this processor has; or by name, null if it cannot run here.
const RowKernels& row_kernels();
const RowKernels* row_kernels(const char* isa);

constexpr int64_t kTokensPerChunk = 4096;

// sequence_counts has a zero for each sequence.
void count_tokens(const PrepareParams& params, TokenCounts& counts, int64_t* sequence_counts);
void prepare_chunk(const PrepareParams& params, int64_t chunk, const TokenCounts& counts,
                   const int64_t* sequence_counts);

// For each of K labels, the sum of the values of all equal ones, in their order. The memory is the
// thread's own, until its next call.
double* sums_of_equal(const int64_t* labels, const double* values, int64_t K);

void find_labels_chunk(const FindLabelsParams& params, int64_t chunk);

// A counting sort of values [begin, end): how many each column has, then their places from these
// on. The first and the last of columns + 2 are values before and behind the columns here.
void count_columns(const SortSetsParams& params, int64_t begin, int64_t end, int64_t* counts);
void sort_values(const SortSetsParams& params, int64_t begin, int64_t end, int64_t* places);

// k is one of the span_count(sequences) sequences.
void sequence_mean(const SequenceMeanParams& params, int64_t k);

// bins are those of one chunk, the lower side first.
void contributions_chunk(const ContributionParams& params, int64_t chunk, Moments* bins);
void contributions_reduce(const ContributionParams& params, const Moments* partials,
                          int64_t chunks);
void solve(const SolveParams& params);

void token_loss_chunk(const TokenLossParams& params, int64_t chunk, TokenLossSums& sums);
void token_loss_reduce(const TokenLossParams& params, const TokenLossSums* partials,
                       int64_t chunks);

}  // namespace bapo::cpu
