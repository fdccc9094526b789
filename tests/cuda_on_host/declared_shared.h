// Variables declared __shared__ become thread-local variables, the only ones of this library, so
// that they lie together in memory and can be found. One copy is enough, because only blocks
// outside clusters have any.
#pragma once

#include <link.h>

#include <cstdint>
#include <span>

namespace emulated {

// Makes this thread allocate its copy.
inline thread_local volatile uint8_t mark;

inline std::span<uint8_t> declared_shared() {
    mark = 0;
    std::span<uint8_t> found;
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* result) {
            for (int i = 0; i < object->dlpi_phnum; ++i) {
                const ElfW(Phdr) & header = object->dlpi_phdr[i];
                auto* const start = static_cast<uint8_t*>(object->dlpi_tls_data);
                if (header.p_type != PT_TLS || start == nullptr) continue;
                const auto offset = (uintptr_t)&mark - (uintptr_t)start;
                if (offset >= header.p_memsz) continue;
                *static_cast<std::span<uint8_t>*>(result) = {start, header.p_memsz};
                return 1;
            }
            return 0;
        },
        &found);
    return found;
}

}  // namespace emulated
