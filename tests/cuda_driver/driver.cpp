// Runs the CUDA kernels without torch and compares them with plain loops in double: the first thing
// to run on a GPU, by itself and under compute-sanitizer. Prints a line per case. The exit status
// is 1 if a case failed, and 2 after a CUDA error or a case that hangs, which skip the rest.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "cases.h"

namespace driver {
namespace {

constexpr const char* kUsage =
    "driver [--only SUBSTRING] [--quick] [--list] [--limit SECONDS] [--exact]\n"
    "  --quick  short rows, for compute-sanitizer\n"
    "  --limit  of a case, 60 by default; 0: none\n"
    "  --exact  no guard bytes, so that memcheck sees the ends of every allocation\n";

std::string only;
unsigned limit = 60;
bool quick = false, list = false;

bool parse(int count, char** words) {
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        const bool last = i + 1 == count;
        if (word == "--quick") {
            quick = true;
        } else if (word == "--list") {
            list = true;
        } else if (word == "--exact") {
            Memory::guard = 0;
        } else if (word == "--only" && !last) {
            only = words[++i];
        } else if (word == "--limit" && !last) {
            limit = (unsigned)std::atoi(words[++i]);
        } else {
            return false;
        }
    }
    return true;
}

char current[256] = "before the first case";

void no_end(int) {
    for (const char* part : {"FAILED  no end  ", (const char*)current, "\n"}) {
        [[maybe_unused]] const auto written = write(STDOUT_FILENO, part, std::strlen(part));
    }
    _exit(2);
}

// Whether the case succeeded.
bool report(const Case& of) {
    std::snprintf(current, sizeof current, "%s", of.name.c_str());
    alarm(limit);
    const auto start = std::chrono::steady_clock::now();
    Verdict verdict;
    of.run(verdict);
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    alarm(0);
    std::printf("%s %5.0f ms  %s%s\n", verdict.good() ? "ok    " : "FAILED", ms.count(), current,
                verdict.summary().c_str());
    return verdict.good();
}

int run_all() {
    std::vector<Case> cases;
    for (const auto all : {token_cases, row_cases}) {
        for (const Case& of : all(quick)) {
            if (of.name.find(only) != std::string::npos) cases.push_back(of);
        }
    }
    if (list) {
        for (const Case& of : cases) std::printf("%s\n", of.name.c_str());
        return 0;
    }
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, sm_%d%d, %d multiprocessors of %zu KB shared memory\n", device.name,
                device.major, device.minor, device.multiProcessorCount,
                device.sharedMemPerMultiprocessor >> 10);
    int failed = 0;
    for (const Case& of : cases) failed += !report(of);
    std::printf("%d of %zu cases failed\n", failed, cases.size());
    return failed > 0;
}

}  // namespace
}  // namespace driver

int main(int count, char** words) {
    if (!driver::parse(count, words)) {
        std::fputs(driver::kUsage, stderr);
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    signal(SIGALRM, driver::no_end);
    try {
        return driver::run_all();
    } catch (const std::runtime_error& error) {  // of CUDA, or of the emulation
        std::printf("FAILED  %s  %s\n", driver::current, error.what());
        return 2;
    }
}
