// A case of the row kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/launch_cuda.h"
#include "verdict.h"

namespace driver {

enum class Start { kAligned, kUnaligned };  // of rows: multiples of 16 bytes, or not
enum class Output { kNone, kSeparate, kInPlace };

struct RowCase {
    bapo::DType dtype = bapo::DType::kBFloat16;
    int cluster = 1;  // 0: the generic kernel
    int64_t vocab = 0;
    int64_t rows = 9;
    int64_t batches = 1;
    Start start = Start::kAligned;
    Output output = Output::kInPlace;
    bool softcap = false;
    bool entropy = false;
    bool kl = false;
    bool temperatures = false;  // of every row
    bool known_bounds = false;
    bool bad_values = false;  // NaN and -inf logits, labels outside the vocabulary

    std::string name() const;
};

inline int64_t size_of(bapo::DType dtype) { return dtype == bapo::DType::kFloat32 ? 4 : 2; }

// The row pass, the gradient of undecided rows and the scaling; then the row pass again, of all
// rows and of one row alone, for the same bits.
void run(const RowCase& row_case, Verdict& verdict);

// The times of such rows as one line, all with a gradient if there is an output; checks nothing.
std::string times(const RowCase& row_case);

}  // namespace driver
