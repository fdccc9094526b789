#include "cases.h"

#include <algorithm>
#include <bit>

#include "cuda/launch_cuda.h"

namespace driver {

using namespace bapo;

namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int64_t kChunkBytes = 2048, kRealVocab = 151'936;

// Of the shortest rows of every cluster size.
constexpr RowCase kOptions[] = {
    {.with = kUnaligned, .output = Output::kNone},
    {.with = kUnaligned, .output = Output::kSeparate, .batches = 3},
    {.rows = 1},
    {.with = kKnownBounds},
    {.with = kSoftcap | kEntropy | kKl | kTemperatures, .output = Output::kSeparate, .batches = 2},
    {.with = kUnaligned | kTemperatures},
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

std::string name(const RowCase& of) {
    const bool wide = of.dtype == DType::kFloat32, bf16 = of.dtype == DType::kBFloat16;
    std::string text = wide ? "fp32" : bf16 ? "bf16" : "fp16";
    text += " V=" + std::to_string(of.vocab) + " rows=";
    if (of.batches > 1) text += std::to_string(of.batches) + "x";
    text += std::to_string(of.rows);
    text += of.cluster ? " cluster=" + std::to_string(of.cluster) : " generic";
    text += of.has(kUnaligned) ? " unaligned" : " aligned";
    text += kOutputs[(int)of.output];
    for (size_t i = 0; i < std::size(kWords); ++i) {
        if (of.with >> i & 1) text += kWords[i];
    }
    return text;
}

}  // namespace

std::vector<Case> row_cases(bool quick) {
    std::vector<Case> cases;
    const auto to = [](bool in_place) { return in_place ? Output::kInPlace : Output::kSeparate; };
    const auto add = [&](const RowCase& of) {
        cases.push_back({name(of), [of](Verdict& verdict) { run(of, verdict); }});
    };
    const std::vector<Lengths> lengths = lengths_by_cluster();
    int first_turn = 0;
    for (const DType dtype : kDTypes) {
        const bool bf16 = dtype == DType::kBFloat16;
        const int64_t size = dtype == DType::kFloat32 ? 4 : 2, unit = 16 / size;
        for (const int64_t vocab : {1, 7, 257}) {
            if (quick && vocab != 7) continue;
            const int cluster = planned_cluster(dtype, vocab);
            add({dtype, cluster, vocab});
            add({dtype, cluster, vocab, kUnaligned | kEntropy, Output::kSeparate});
        }
        int turn = first_turn++;
        for (const auto& [cluster, shortest, longest, again] : lengths) {
            if (quick && again) continue;  // the shortest rows of each cluster size
            // A little shorter than whole chunks: ending within a vector, or at the end of one.
            const int64_t within = shortest * kChunkBytes / size - 2 * unit - 3;
            const auto whole = [&](int64_t n) { return n * kChunkBytes / size - 3 * unit; };
            for (unsigned with = 0; !quick && with < 8; ++with) {
                add({dtype, cluster, with & kEntropy ? within : whole(shortest), with,
                     to((turn + std::popcount(with)) % 2)});
            }
            for (const bool second : {false, true}) {
                const unsigned with = second ? kUnaligned | kEntropy : 0;
                const unsigned softcap = (turn / 2 + second) % 2 ? kSoftcap : 0;
                if (quick) add({dtype, cluster, within, with | softcap, to((turn + second) % 2)});
                if (again || (quick && !bf16)) continue;
                add({dtype, cluster, within, with | kBadValues, to(!second)});
            }
            for (const RowCase& of : kOptions) {
                if (again || (quick && (!bf16 || cluster != 1))) continue;
                add({dtype, cluster, within, of.with, of.output, of.rows, of.batches});
            }
            const int starts = cluster > 0 ? bf16 + !(quick || again) : 0;
            for (int k = 0; k < starts; ++k) {
                const unsigned with = (turn + k) % 2 ? kUnaligned : 0;
                add({dtype, cluster, whole(longest), with, to(true), many_rows(cluster)});
            }
            ++turn;
        }
        const int cluster = planned_cluster(dtype, kRealVocab);
        const int64_t rows = many_rows(cluster);
        if (!quick) add({dtype, cluster, kRealVocab, 0, to(true), rows});
        if (!quick && bf16) {
            add({dtype, cluster, kRealVocab, kSoftcap | kEntropy, to(false), rows});
        }
    }
    return cases;
}

}  // namespace driver
