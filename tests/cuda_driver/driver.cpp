// Runs the CUDA kernels without torch and compares them with plain loops in double: the first thing
// to run on a GPU, by itself and under compute-sanitizer. Prints a line per case. The exit status
// is 1 if a case failed, and 2 after a CUDA error or a case that hangs, which skip the rest.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>

#include "cases.h"

namespace driver {
namespace {

constexpr const char* kUsage =
    "driver [--only SUBSTRING] [--rows N] [--quick] [--list] [--repeat R] [--limit SECONDS] "
    "[--exact]\n"
    "  --quick  short rows, for compute-sanitizer\n"
    "  --limit  of a case, 60 by default; 0: none\n"
    "  --exact  no guard bytes, so that memcheck sees the ends of every allocation\n";

struct Options {
    std::string only;
    int64_t rows = 0;
    int repeat = 1;
    unsigned limit = 60;
    bool quick = false;
    bool list = false;
};

struct Case {
    std::string name;
    std::function<void(Verdict&)> run;
};

std::vector<Case> cases_of(const Options& options) {
    std::vector<Case> cases;
    const auto add = [&](const auto& of) {
        cases.push_back({of.name(), [of](Verdict& verdict) { run(of, verdict); }});
    };
    for (const TokenCase& of : token_cases(options.quick)) add(of);
    for (const SequenceCase& of : sequence_cases(options.quick)) add(of);
    for (RowCase of : row_cases(options.quick)) {
        if (options.rows > 0) of.rows = options.rows;
        add(of);
    }
    std::erase_if(cases,
                  [&](const Case& of) { return of.name.find(options.only) == std::string::npos; });
    return cases;
}

char current[256];

void no_end(int) {
    for (const char* part : {"FAILED  no end  ", (const char*)current, "\n"}) {
        [[maybe_unused]] const auto written = write(STDOUT_FILENO, part, std::strlen(part));
    }
    _exit(2);
}

// Whether the case succeeded.
bool report(const Case& of, unsigned limit) {
    std::snprintf(current, sizeof current, "%s", of.name.c_str());
    alarm(limit);
    const auto start = std::chrono::steady_clock::now();
    Verdict verdict;
    of.run(verdict);
    const auto took = std::chrono::steady_clock::now() - start;
    alarm(0);
    const auto ms = (long)std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
    std::printf("%s %5ld ms  %s%s\n", verdict.good() ? "ok    " : "FAILED", ms, current,
                verdict.summary().c_str());
    return verdict.good();
}

int run_all(const Options& options) {
    const std::vector<Case> cases = cases_of(options);
    int failed = 0;
    for (const Case& of : cases) {
        if (options.list) std::printf("%s\n", of.name.c_str());
    }
    if (options.list) return 0;
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, sm_%d%d, %d multiprocessors of %zu KB shared memory\n", device.name,
                device.major, device.minor, device.multiProcessorCount,
                device.sharedMemPerMultiprocessor >> 10);
    try {
        for (int repetition = 0; repetition < options.repeat; ++repetition) {
            for (const Case& of : cases) failed += !report(of, options.limit);
        }
        std::printf("%d of %zu cases failed\n", failed, cases.size() * options.repeat);
        if (options.quick || failed > 0) return failed > 0;
        for (const RowCase& of : timed_cases()) {
            if (of.name().find(options.only) == std::string::npos) continue;
            std::snprintf(current, sizeof current, "times of %s", of.name().c_str());
            std::printf("%s\n", times(of).c_str());
        }
    } catch (const std::runtime_error& error) {  // of CUDA, or of the emulation
        std::printf("FAILED  %s  %s\n", current, error.what());
        return 2;
    }
    return 0;
}

bool parse(int count, char** words, Options& options) {
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        const char* const value = i + 1 < count ? words[i + 1] : nullptr;
        if (word == "--quick") {
            options.quick = true;
        } else if (word == "--list") {
            options.list = true;
        } else if (word == "--exact") {
            Memory::guard = 0;
        } else if (value == nullptr) {
            return false;
        } else if (++i; word == "--only") {
            options.only = value;
        } else if (word == "--rows") {
            options.rows = std::atoll(value);
        } else if (word == "--repeat") {
            options.repeat = std::atoi(value);
        } else if (word == "--limit") {
            options.limit = (unsigned)std::atoi(value);
        } else {
            return false;
        }
    }
    return true;
}

}  // namespace
}  // namespace driver

int main(int count, char** words) {
    driver::Options options;
    if (!driver::parse(count, words, options)) {
        std::fputs(driver::kUsage, stderr);
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    signal(SIGALRM, driver::no_end);
    try {
        return driver::run_all(options);
    } catch (const driver::CudaFailure& error) {
        std::printf("FAILED  %s\n", error.what());
        return 2;
    }
}
