// Entry points of the CUDA kernels; no torch. `stream` is a cudaStream_t. Each returns null or the
// message of an error. None of them waits for the device.
#pragma once

#include "params.h"

namespace bapo::cuda {

const char* row_pass(const RowPassParams& params, void* stream);
const char* row_gradient(const RowGradientParams& params, void* stream);
// x *= factor in rows; with a factor of 1 the kernel returns at once.
const char* scale(const LogitRows& rows, const float* factor, void* stream);

constexpr int kTokensPerBlock = 256;

inline int64_t token_blocks(int64_t count) {
    return (count + kTokensPerBlock - 1) / kTokensPerBlock;
}

// Partials: one table per block of tokens.
const char* contributions(const ContributionParams& params, int points, double* partials,
                          void* stream);
const char* solve(const double* table, const Grid& lower, const Grid& upper,
                  const TargetParams& target, float* bounds, double* masses, void* stream);
// Partials: kPolicySums per block of tokens.
const char* policy(const PolicyParams& params, double* partials, void* stream);

// The row pass for sm_90 and later, which holds rows in the shared memory of a cluster; false where
// the device has no clusters or a row does not fit into one.
bool row_pass_cluster(const RowPassParams& params, void* stream, const char** error);
// Blocks in a cluster that holds such rows on this device; 0: they do not fit.
int planned_cluster(const LogitRows& rows);

}  // namespace bapo::cuda
