// The combinations that are tested, the simplest first.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "params.h"
#include "verdict.h"

namespace driver {

struct Case {
    std::string name;
    std::function<void(Verdict&)> run;
};

// Of contributions, the search over them, and the loss at the final bounds; and of means over
// sequences. Twice, for the same bits.
std::vector<Case> token_cases(bool quick);
// Rows of every dtype and cluster size; quick: few and short ones, for compute-sanitizer.
std::vector<Case> row_cases(bool quick);

enum class Output { kNone, kSeparate, kInPlace };
constexpr const char* kOutputs[] = {" log-probs", " out of place", " in place"};

// What a row case is run with: bits, and the words for them.
constexpr unsigned kUnaligned = 1;  // rows start at multiples of 16 bytes, or not
constexpr unsigned kSoftcap = 2, kEntropy = 4, kKl = 8;
constexpr unsigned kTemperatures = 16;  // of every row
constexpr unsigned kKnownBounds = 32;
constexpr unsigned kBadValues = 64;  // NaN and -inf logits, labels outside the vocabulary
constexpr const char* kWords[] = {
    "", " softcap", " entropy", " kl", " temperatures", " known bounds", " bad values"};

struct RowCase {
    bapo::DType dtype{};
    int cluster = 0;  // 0: the generic kernel
    int64_t vocab = 0;
    unsigned with = 0;
    Output output = Output::kInPlace;
    int64_t rows = 9;
    int64_t batches = 1;

    bool has(unsigned what) const { return with & what; }
};

// The row pass, the gradient of undecided rows and the scaling; then the row pass again, of all
// rows and of one row alone, for the same bits.
void run(const RowCase& of, Verdict& verdict);

}  // namespace driver
