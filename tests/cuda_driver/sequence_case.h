// A case of the kernel that takes means over sequences.
#pragma once

#include <cstdint>
#include <string>

#include "verdict.h"

namespace driver {

struct SequenceCase {
    int64_t tokens = 0;
    bool packed = false;  // sequences between offsets, else rows of one length

    std::string name() const;
};

// Log-ratios of sequences and their gradients, each twice, for the same bits.
void run(const SequenceCase& sequence_case, Verdict& verdict);

}  // namespace driver
