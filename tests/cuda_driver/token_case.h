// A case of the kernels over tokens.
#pragma once

#include <cstdint>
#include <string>

#include "policy_math.h"
#include "verdict.h"

namespace driver {

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

// Contributions, the search over them, and the loss at the final bounds; twice, for the same bits.
void run(const TokenCase& token_case, Verdict& verdict);

}  // namespace driver
