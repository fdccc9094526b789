// The combinations that are tested, the simplest first.
#pragma once

#include <vector>

#include "row_case.h"
#include "sequence_case.h"
#include "token_case.h"

namespace driver {

// Rows of every dtype and cluster size; quick: few and short ones, for compute-sanitizer.
std::vector<RowCase> row_cases(bool quick);
std::vector<TokenCase> token_cases(bool quick);
std::vector<SequenceCase> sequence_cases(bool quick);
std::vector<RowCase> timed_cases();

}  // namespace driver
