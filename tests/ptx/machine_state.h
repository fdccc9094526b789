// A launch while it runs.
#pragma once

#include "memory.h"

namespace ptx {

struct Machine {
    std::span<const Instruction> code;
    Memory memory;
    std::mt19937_64 random;
};

}  // namespace ptx
