#include "cases.h"

#include <algorithm>

namespace driver {

using namespace bapo;

namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int64_t kChunkBytes = 2048, kRealVocab = 151'936;

cudaDeviceProp device() {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0));
    return properties;
}

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
};

std::vector<Lengths> lengths_by_cluster() {
    constexpr int64_t kLongest = 4000;
    std::vector<Lengths> all;
    for (int64_t chunks = 1; chunks <= kLongest; ++chunks) {
        const int cluster = planned_cluster(DType::kFloat32, chunks * kChunkBytes / 4);
        if (all.empty() || all.back().cluster != cluster) all.push_back({cluster, chunks, chunks});
        all.back().longest = chunks;
        if (cluster == 0 && all.size() > 1) break;  // short rows have none either
    }
    return all;
}

// Enough rows for every cluster to fill its ring of stages several times.
int64_t many_rows(int cluster) {
    const int64_t at_once = 4 * device().multiProcessorCount / std::max(cluster, 1);
    return std::max<int64_t>(3 * at_once + 1, 20);
}

// Adds cases of one dtype whose rows have the same layout.
class Adder {
  public:
    Adder(std::vector<RowCase>& cases, DType dtype, const Lengths& lengths)
        : cases_(cases), lengths_(lengths), base_{.dtype = dtype, .cluster = lengths.cluster} {}

    // A little shorter than whole chunks: ending within a vector, or at the end of one.
    RowCase of(int64_t chunks, Start start, Output output, bool whole_vectors = false) const {
        RowCase added = base_;
        const int64_t size = size_of(base_.dtype), unit = 16 / size;
        added.vocab = chunks * kChunkBytes / size - (whole_vectors ? 3 * unit : 2 * unit + 3);
        added.start = start;
        added.output = output;
        return added;
    }
    RowCase of(Start start, Output output) const { return of(lengths_.shortest, start, output); }

    void all_kernels(int turn) {
        for (int which = 0; which < 8; ++which) {
            const bool softcap = which & 1, entropy = which & 2, unaligned = which & 4;
            const bool in_place = (turn + softcap + entropy + unaligned) % 2;
            RowCase added = of(lengths_.shortest, unaligned ? Start::kUnaligned : Start::kAligned,
                               in_place ? Output::kInPlace : Output::kSeparate, !entropy);
            added.softcap = softcap;
            added.entropy = entropy;
            cases_.push_back(added);
        }
    }
    void two_kernels(int turn) {
        RowCase plain = of(Start::kAligned, turn % 2 ? Output::kInPlace : Output::kSeparate);
        plain.softcap = turn / 2 % 2;
        RowCase unaligned = of(Start::kUnaligned, turn % 2 ? Output::kSeparate : Output::kInPlace);
        unaligned.softcap = !plain.softcap;
        unaligned.entropy = true;
        cases_.insert(cases_.end(), {plain, unaligned});
    }
    void many(bool unaligned) {
        const Start start = unaligned ? Start::kUnaligned : Start::kAligned;
        RowCase added = of(lengths_.longest, start, Output::kInPlace, true);
        added.rows = many_rows(added.cluster);
        cases_.push_back(added);
    }
    void bad_values() {
        for (const bool unaligned : {false, true}) {
            RowCase added = of(unaligned ? Start::kUnaligned : Start::kAligned,
                               unaligned ? Output::kSeparate : Output::kInPlace);
            added.entropy = unaligned;
            added.bad_values = true;
            cases_.push_back(added);
        }
    }
    void options() {
        RowCase log_probs = of(Start::kUnaligned, Output::kNone);
        RowCase batches = of(Start::kUnaligned, Output::kSeparate);
        batches.batches = 3;
        RowCase one = of(Start::kAligned, Output::kInPlace);
        one.rows = 1;
        RowCase known = of(Start::kAligned, Output::kInPlace);
        known.known_bounds = true;
        RowCase all = of(Start::kAligned, Output::kSeparate);
        all.batches = 2;
        all.softcap = all.entropy = all.kl = all.temperatures = true;
        RowCase per_row = of(Start::kUnaligned, Output::kInPlace);
        per_row.temperatures = true;
        cases_.insert(cases_.end(), {log_probs, batches, one, known, all, per_row});
    }

  private:
    std::vector<RowCase>& cases_;
    const Lengths lengths_;
    const RowCase base_;
};

RowCase real_size(DType dtype, Output output) {
    const int cluster = planned_cluster(dtype, kRealVocab);
    return {.dtype = dtype,
            .cluster = cluster,
            .vocab = kRealVocab,
            .rows = many_rows(cluster),
            .output = output};
}

}  // namespace

std::string RowCase::name() const {
    const char* const of_dtype = dtype == DType::kFloat32    ? "fp32"
                                 : dtype == DType::kBFloat16 ? "bf16"
                                                             : "fp16";
    std::string text = std::string(of_dtype) + " V=" + std::to_string(vocab) +
                       " rows=" + (batches > 1 ? std::to_string(batches) + "x" : "") +
                       std::to_string(rows);
    text += cluster ? " cluster=" + std::to_string(cluster) : " generic";
    text += start == Start::kAligned ? " aligned" : " unaligned";
    text += output == Output::kNone       ? " log-probs"
            : output == Output::kSeparate ? " out of place"
                                          : " in place";
    for (const auto& [on, word] : {std::pair{softcap, " softcap"},
                                   {entropy, " entropy"},
                                   {kl, " kl"},
                                   {temperatures, " temperatures"},
                                   {known_bounds, " known bounds"},
                                   {bad_values, " bad values"}}) {
        if (on) text += word;
    }
    return text;
}

std::vector<RowCase> row_cases(bool quick) {
    std::vector<RowCase> cases;
    std::vector<Lengths> lengths = lengths_by_cluster();
    for (const DType dtype : kDTypes) {
        const bool bf16 = dtype == DType::kBFloat16;
        for (int64_t vocab : {1, 7, 257}) {
            if (quick && vocab != 7) continue;
            const int cluster = planned_cluster(dtype, vocab);
            cases.push_back({.dtype = dtype, .cluster = cluster, .vocab = vocab});
            cases.push_back({.dtype = dtype,
                             .cluster = cluster,
                             .vocab = vocab,
                             .start = Start::kUnaligned,
                             .output = Output::kSeparate,
                             .entropy = true});
        }
        int turn = dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 1 : 2;
        std::vector<int> seen;
        for (const Lengths& alike : lengths) {
            // Quick runs use the shortest rows of each cluster size.
            const bool again = std::count(seen.begin(), seen.end(), alike.cluster) > 0;
            if (quick && again) continue;
            seen.push_back(alike.cluster);
            Adder add(cases, dtype, alike);
            quick ? add.two_kernels(turn) : add.all_kernels(turn);
            if (!again && (!quick || bf16)) add.bad_values();
            if (!again && !quick) add.options();
            if (alike.cluster > 0 && (bf16 || !(quick || again))) add.many(turn % 2);
            if (alike.cluster > 0 && bf16 && !(quick || again)) add.many(turn % 2 == 0);
            ++turn;
        }
        if (!quick) cases.push_back(real_size(dtype, Output::kInPlace));
    }
    if (!quick) {
        RowCase all = real_size(DType::kBFloat16, Output::kSeparate);
        all.softcap = all.entropy = true;
        cases.push_back(all);
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
        }
    }
    return cases;
}

}  // namespace driver
