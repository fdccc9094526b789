// The combinations that are tested, the simplest first.
#pragma once

#include <string>
#include <vector>

#include "params.h"
#include "verdict.h"

namespace driver {

enum class Output { kNone, kSeparate, kInPlace };

// Of the row kernels.
struct RowCase {
    bapo::DType dtype = bapo::DType::kBFloat16;
    int cluster = 1;  // 0: the generic kernel
    int64_t vocab = 0;
    int64_t rows = 9;
    int64_t batches = 1;
    bool unaligned = false;  // rows start at multiples of 16 bytes, or not
    Output output = Output::kInPlace;
    bool softcap = false;
    bool entropy = false;
    bool kl = false;
    bool temperatures = false;  // of every row
    bool known_bounds = false;
    bool bad_values = false;  // NaN and -inf logits, labels outside the vocabulary
    bool on_policy = false;   // for times: with A > 0, so that all are decided, with a gradient

    std::string name() const;
};

// Of the kernels over tokens.
struct TokenCase {
    int64_t count = 0;
    bool uniform_weight = false;
    bool unclipped_only = false;   // contributions, else all that are held at the bounds
    bool target_is_ratio = false;  // pos/neg, else pos/(pos + neg)
    bool upper_first = false;
    bool all_inputs = false;  // old, reference and rollout log-probs, importance weights
    int64_t surrogate = bapo::kClip;
    bool own_bounds = false;  // of each token, at which the loss is taken
    bool log_ratios = false;  // given, as those of sequences are

    std::string name() const;
};

// Of the kernel that takes means over sequences.
struct SequenceCase {
    int64_t tokens = 0;
    bool packed = false;  // sequences between offsets, else rows of one length

    std::string name() const;
};

// Rows of every dtype and cluster size; quick: few and short ones, for compute-sanitizer.
std::vector<RowCase> row_cases(bool quick);
std::vector<TokenCase> token_cases(bool quick);
std::vector<SequenceCase> sequence_cases(bool quick);
std::vector<RowCase> timed_cases();

// The row pass, the gradient of undecided rows and the scaling; then the row pass again, of all
// rows and of one row alone, for the same bits.
void run(const RowCase& of, Verdict& verdict);
// Contributions, the search over them, and the loss at the final bounds; twice, for the same bits.
void run(const TokenCase& of, Verdict& verdict);
// Log-ratios of sequences and their gradients, each twice, for the same bits.
void run(const SequenceCase& of, Verdict& verdict);

// The times of such rows as one line, all with a gradient if there is an output; checks nothing.
std::string times(const RowCase& of);

}  // namespace driver
