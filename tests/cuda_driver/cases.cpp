#include "cases.h"

#include <algorithm>

#include "cuda/launch_cuda.h"

namespace driver {

using namespace bapo;

namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int64_t kChunkBytes = 2048, kRealVocab = 151'936;

// Of the shortest rows of every cluster size.
constexpr RowCase kOptions[] = {
    {.unaligned = true, .output = Output::kNone},
    {.batches = 3, .unaligned = true, .output = Output::kSeparate},
    {.rows = 1},
    {.known_bounds = true},
    {.batches = 2,
     .output = Output::kSeparate,
     .softcap = true,
     .entropy = true,
     .kl = true,
     .temperatures = true},
    {.unaligned = true, .temperatures = true},
};

int planned_cluster(DType dtype, int64_t vocab) {
    LogitRows rows{};
    rows.dtype = dtype;
    rows.vocab = vocab;
    return cuda::planned_cluster(rows);
}

// Lengths of rows, in chunks, with the same layout.
struct Lengths {
    int cluster;
    int64_t shortest, longest;
    bool again;  // after others with clusters of this size
};

std::vector<Lengths> lengths_by_cluster() {
    constexpr int64_t kLongest = 4000;
    std::vector<Lengths> all;
    for (int64_t chunks = 1; chunks <= kLongest; ++chunks) {
        const int cluster = planned_cluster(DType::kFloat32, chunks * kChunkBytes / 4);
        if (all.empty() || all.back().cluster != cluster) {
            const bool again = std::ranges::count(all, cluster, &Lengths::cluster) > 0;
            all.push_back({cluster, chunks, chunks, again});
        }
        all.back().longest = chunks;
        if (cluster == 0 && all.size() > 1) break;  // short rows have none either
    }
    return all;
}

// Enough rows for every cluster to fill its ring of stages several times.
int64_t many_rows(int cluster) {
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0));
    const int64_t at_once = 4 * device.multiProcessorCount / std::max(cluster, 1);
    return std::max<int64_t>(3 * at_once + 1, 20);
}

RowCase real_size(DType dtype, Output output) {
    const int cluster = planned_cluster(dtype, kRealVocab);
    return {.dtype = dtype,
            .cluster = cluster,
            .vocab = kRealVocab,
            .rows = many_rows(cluster),
            .output = output};
}

std::string words(std::initializer_list<std::pair<bool, const char*>> all) {
    std::string text;
    for (const auto& [on, word] : all) {
        if (on) text += word;
    }
    return text;
}

}  // namespace

std::string RowCase::name() const {
    const char* const of_dtype = dtype == DType::kFloat32    ? "fp32"
                                 : dtype == DType::kBFloat16 ? "bf16"
                                                             : "fp16";
    return std::string(of_dtype) + " V=" + std::to_string(vocab) +
           " rows=" + (batches > 1 ? std::to_string(batches) + "x" : "") + std::to_string(rows) +
           (cluster ? " cluster=" + std::to_string(cluster) : " generic") +
           words({{!unaligned, " aligned"},
                  {unaligned, " unaligned"},
                  {output == Output::kNone, " log-probs"},
                  {output == Output::kSeparate, " out of place"},
                  {output == Output::kInPlace, " in place"},
                  {softcap, " softcap"},
                  {entropy, " entropy"},
                  {kl, " kl"},
                  {temperatures, " temperatures"},
                  {known_bounds, " known bounds"},
                  {bad_values, " bad values"}});
}

std::string TokenCase::name() const {
    return "tokens=" + std::to_string(count) + (upper_first ? " upper first" : " lower first") +
           words({{uniform_weight, " uniform weight"},
                  {unclipped_only, " unclipped only"},
                  {target_is_ratio, " ratio"},
                  {all_inputs, " all inputs"},
                  {surrogate == kCispo, " cispo"},
                  {surrogate == kSapo, " sapo"},
                  {surrogate == kMask, " mask"},
                  {own_bounds, " own bounds"},
                  {log_ratios, " log-ratios"}});
}

std::string SequenceCase::name() const {
    return "means over sequences, tokens=" + std::to_string(tokens) +
           (packed ? " packed" : " padded");
}

std::vector<RowCase> row_cases(bool quick) {
    std::vector<RowCase> cases;
    const auto output = [](bool in_place) {
        return in_place ? Output::kInPlace : Output::kSeparate;
    };
    const std::vector<Lengths> lengths = lengths_by_cluster();
    int first_turn = 0;
    for (const DType dtype : kDTypes) {
        const bool bf16 = dtype == DType::kBFloat16;
        const int64_t size = dtype == DType::kFloat32 ? 4 : 2, unit = 16 / size;
        for (const int64_t vocab : {1, 7, 257}) {
            if (quick && vocab != 7) continue;
            const int cluster = planned_cluster(dtype, vocab);
            for (const bool second : {false, true}) {
                cases.push_back({.dtype = dtype,
                                 .cluster = cluster,
                                 .vocab = vocab,
                                 .unaligned = second,
                                 .output = output(!second),
                                 .entropy = second});
            }
        }
        int turn = first_turn++;
        for (const auto& [cluster, shortest, longest, again] : lengths) {
            if (quick && again) continue;  // the shortest rows of each cluster size
            // A little shorter than whole chunks: ending within a vector, or at the end of one.
            const int64_t within = shortest * kChunkBytes / size - 2 * unit - 3;
            const auto whole = [&](int64_t n) { return n * kChunkBytes / size - 3 * unit; };
            const auto add = [&](RowCase of) {
                of.dtype = dtype;
                of.cluster = cluster;
                if (of.vocab == 0) of.vocab = within;
                cases.push_back(of);
            };
            for (int which = 0; !quick && which < 8; ++which) {
                const bool softcap = which & 1, entropy = which & 2, unaligned = which & 4;
                add({.vocab = entropy ? 0 : whole(shortest),
                     .unaligned = unaligned,
                     .output = output((turn + softcap + entropy + unaligned) % 2),
                     .softcap = softcap,
                     .entropy = entropy});
            }
            for (const bool second : {false, true}) {
                if (!quick) continue;
                add({.unaligned = second,
                     .output = output((turn + second) % 2),
                     .softcap = (turn / 2 + second) % 2 == 1,
                     .entropy = second});
            }
            for (const bool second : {false, true}) {
                if (again || (quick && !bf16)) continue;
                add({.unaligned = second,
                     .output = output(!second),
                     .entropy = second,
                     .bad_values = true});
            }
            for (const RowCase& of : kOptions) {
                if (!again && !quick) add(of);
            }
            const int starts = cluster > 0 ? bf16 + !(quick || again) : 0;
            for (int k = 0; k < starts; ++k) {
                add({.vocab = whole(longest),
                     .rows = many_rows(cluster),
                     .unaligned = (turn + k) % 2 == 1});
            }
            ++turn;
        }
        if (!quick) cases.push_back(real_size(dtype, Output::kInPlace));
    }
    if (!quick) {
        cases.push_back(real_size(DType::kBFloat16, Output::kSeparate));
        cases.back().softcap = cases.back().entropy = true;
    }
    return cases;
}

std::vector<TokenCase> token_cases(bool quick) {
    std::vector<TokenCase> cases;
    for (const int64_t count : {1, 255, 256, 257, quick ? 1'000 : 100'000}) {
        for (int which = 0; which < (quick ? 2 : 4); ++which) {
            cases.push_back({.count = count,
                             .uniform_weight = which == 1,
                             .unclipped_only = which >= 2,
                             .target_is_ratio = which == 2,
                             .upper_first = which % 2 == 1,
                             .all_inputs = which != 2});
        }
        for (const int64_t surrogate : {kClip, kCispo, kSapo, kMask}) {
            for (const bool log_ratios : {false, true}) {
                cases.push_back({.count = count,
                                 .all_inputs = true,
                                 .surrogate = surrogate,
                                 .own_bounds = surrogate != kSapo,
                                 .log_ratios = log_ratios});
            }
        }
    }
    return cases;
}

std::vector<SequenceCase> sequence_cases(bool quick) {
    std::vector<SequenceCase> cases;
    for (const int64_t tokens : {1, quick ? 70 : 1'100, quick ? 3'000 : 100'000}) {
        for (const bool packed : {false, true}) cases.push_back({tokens, packed});
    }
    return cases;
}

std::vector<RowCase> timed_cases() {
    std::vector<RowCase> cases;
    for (const DType dtype : kDTypes) {
        for (const Output output : {Output::kSeparate, Output::kInPlace, Output::kNone}) {
            cases.push_back(real_size(dtype, output));
            cases.back().rows = 2'048;
            cases.back().on_policy = true;
        }
    }
    return cases;
}

}  // namespace driver
