// Entry points of the CUDA kernels, on prepare.h; no torch. `stream` is a cudaStream_t. Each
// returns null or the message of an error. None waits for the device: no graph could capture it.
#pragma once

#include "prepare.h"

namespace bapo::cuda {

// The words of 8 bytes that a launch needs besides its operands; its memory is null if none.
int64_t scratch_words(const RowPassParams& params);
int64_t scratch_words(const RowGradientParams& params);
int64_t scratch_words(const PrepareParams& params);
int64_t scratch_words(const ContributionParams& params);
int64_t scratch_words(const TokenLossParams& params);
int64_t scratch_words(const HeadSetPassParams& params);
int64_t scratch_words(const SetHiddenGradientParams& params);
int64_t scratch_words(const SetWeightGradientParams& params);

// These take any number of labels per row, of rows or sets; row_pass, sets_pass and so on take one.
const char* pass_of_labels(const RowPassParams& params, double* memory, void* stream);
const char* gradient_of_labels(const RowGradientParams& params, double* memory, void* stream);
const char* row_pass(const RowPassParams& params, void* stream);
const char* row_gradient(const RowGradientParams& params, void* stream);
// x *= factor in rows; with a factor of 1 the kernel returns at once.
const char* scale(const LogitRows& rows, const float* factor, void* stream);

struct CountedTokens {
    TokenCounts all;
    int64_t sequence_counts[1];  // one for each sequence
};
// counted is null if nothing is counted.
const char* prepare(const PrepareParams& params, CountedTokens* counted, void* stream);
const char* sequence_mean(const SequenceMeanParams& params, void* stream);
const char* contributions(const ContributionParams& params, Moments* partials, void* stream);
const char* search(const ContributionParams& params, const Target& target,
                   const SearchResult& result, Moments* partials, void* stream);
const char* solve(const SolveParams& params, void* stream);
const char* token_loss(const TokenLossParams& params, double* partials, void* stream);

const char* sample_rows(const SampleParams& params, void* stream);
const char* find_labels(const FindLabelsParams& params, void* stream);
const char* gather_sets(const MoveSetsParams& params, void* stream);
const char* scatter_sets(const MoveSetsParams& params, void* stream);
const char* sets_pass(const RowPassParams& params, void* stream);
const char* sets_gradient(const RowGradientParams& params, void* stream);
const char* multiply_sets(const MultiplySetsParams& params, void* stream);
const char* head_sets_pass(const HeadSetPassParams& params, double* parts, void* stream);
const char* sets_dhidden(const SetHiddenGradientParams& params, double* parts, void* stream);
const char* sets_dweight(const SetWeightGradientParams& params, double* parts, void* stream);

// The row pass for sm_90 and later; false where no cluster of this device holds a row.
bool row_pass_cluster(const RowPassParams& params, void* stream, const char** error);
// The binding defines it; it is called once for each kernel and plan that the device refuses.
void warn_of_refusal(const char* message);
// For tests, in which one device takes the place of another.
void clear_occupancy_cache();
// Blocks in a cluster that holds such rows on this device; 0 if none does.
int planned_cluster(const LogitRows& rows);

}  // namespace bapo::cuda
