// Entry points of the CUDA kernels, on prepare.h; no torch. `stream` is a cudaStream_t. Each
// returns null or the message of an error. None waits for the device: no graph could capture it.
#pragma once

#include "prepare.h"

namespace bapo::cuda {

const char* row_pass(const RowPassParams& params, void* stream);
const char* row_gradient(const RowGradientParams& params, void* stream);
// The same of several labels per row, in rows or sets, with label_words(params) of memory.
int64_t label_words(const RowPassParams& params);
int64_t label_words(const RowGradientParams& params);
const char* pass_of_labels(const RowPassParams& params, double* memory, void* stream);
const char* gradient_of_labels(const RowGradientParams& params, double* memory, void* stream);
// x *= factor in rows; with a factor of 1 the kernel returns at once.
const char* scale(const LogitRows& rows, const float* factor, void* stream);

// Scratch memory of prepare, where something is counted: of all tokens, and of every sequence.
struct CountedTokens {
    TokenCounts all;
    int64_t of_sequences[1];
};
inline int64_t counted_words(const PrepareParams& params) {
    const int64_t sequences = counts_sequences(params) ? params.sequences : 0;
    return (int64_t)(sizeof(TokenCounts) / sizeof(int64_t)) + sequences;
}
// counted: counted_words(params) of memory, or null where needs_counts(params) is false.
const char* prepare(const PrepareParams& params, CountedTokens* counted, void* stream);

const char* sequence_mean(const SequenceMeanParams& params, void* stream);

// Numbers of partial sums, for which the kernels of the search and of the loss need memory.
int64_t search_partials(const ContributionParams& params);
int64_t token_loss_partials(int64_t count);

const char* contributions(const ContributionParams& params, Moments* partials, void* stream);
const char* search(const ContributionParams& params, const Target& target,
                   const SearchResult& result, Moments* partials, void* stream);
const char* solve(const SolveParams& params, void* stream);
const char* token_loss(const TokenLossParams& params, double* partials, void* stream);

// Of sampling masks.
const char* find_labels(const FindLabelsParams& params, void* stream);
const char* gather_sets(const MoveSetsParams& params, void* stream);
const char* scatter_sets(const MoveSetsParams& params, void* stream);
const char* sets_pass(const RowPassParams& params, void* stream);
const char* sets_gradient(const RowGradientParams& params, void* stream);
const char* multiply_sets(const MultiplySetsParams& params, void* stream);
// part_words(params): the memory that long sums take.
int64_t part_words(const HeadSetPassParams& params);
int64_t part_words(const SetHiddenGradientParams& params);
int64_t part_words(const SetWeightGradientParams& params);
const char* head_sets_pass(const HeadSetPassParams& params, double* parts, void* stream);
const char* sets_dhidden(const SetHiddenGradientParams& params, double* parts, void* stream);
const char* sets_dweight(const SetWeightGradientParams& params, double* parts, void* stream);

// The row pass for sm_90 and later, which holds rows in the shared memory of a cluster; false where
// the device has no clusters or a row does not fit into one.
bool row_pass_cluster(const RowPassParams& params, void* stream, const char** error);
// Called once for each of its kernels and plans that the device refuses; the binding defines it.
void warn_of_refusal(const char* message);
// For tests, in which one device takes the place of another.
void clear_occupancy_cache();
// Blocks in a cluster that holds such rows on this device; 0: they do not fit.
int planned_cluster(const LogitRows& rows);

}  // namespace bapo::cuda
