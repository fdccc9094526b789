// Registers the CPU kernels, on the threads of torch. May include everything but CUDA.
// Which thread takes a piece of work must not matter, or results would change from run to run.

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "binding_sampling_sets.h"
#include "cpu/denormals.h"
#include "launch.h"
#include "sampling_sets.h"
#include "sequences.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using namespace bapo;
using torch::stable::Tensor;

// The row kernels in use: those of the widest instruction set here, unless a test asks for others.
std::atomic<const cpu::RowKernels*> kernels_in_use{&cpu::row_kernels()};

std::string instruction_set(std::string name) {
    if (!name.empty()) {
        const cpu::RowKernels* found = cpu::row_kernels(name.c_str());
        STD_TORCH_CHECK(found != nullptr, "instruction set must be one that runs here, got ", name);
        kernels_in_use = found;
    }
    return kernels_in_use.load()->isa;
}

// The names that cross from and to Python, in their order.
#define BAPO_TEXT_(...) #__VA_ARGS__
#define BAPO_TEXT(...) BAPO_TEXT_(__VA_ARGS__)
std::string layout() {
    return "fields: " BAPO_TEXT(BAPO_FIELDS) "; options: " BAPO_TEXT(
        BAPO_OPTIONS) "; report: " BAPO_TEXT(BAPO_REPORT);
}

// Large pages make the first touch of a fresh gradient several times cheaper.
void advise_large_pages([[maybe_unused]] void* gradient, [[maybe_unused]] int64_t elements,
                        [[maybe_unused]] DType dtype) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kPage = uintptr_t{1} << 21;
    const auto address = reinterpret_cast<uintptr_t>(gradient);
    const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
    const uintptr_t end = (address + (uintptr_t)(elements * size_of(dtype))) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}
void advise_large_pages(const LogitRows& rows) {
    if (rows.grad == nullptr || rows.grad == rows.logits || rows.are_sets()) return;
    advise_large_pages(rows.grad, rows.count() * rows.vocab, rows.dtype);
}

// kernel(params, queue) on all threads, which share the rows; it takes and makes no denormal.
template <typename Params>
void run_queue(int64_t count, const Params& params, void (*kernel)(const Params&, cpu::RowQueue&)) {
    const int64_t threads = torch::stable::get_num_threads();
    constexpr int64_t kGrainsPerThread = 8;
    const int64_t grain = count / (threads * kGrainsPerThread);
    cpu::RowQueue queue{count, grain > 0 ? grain : 1};
    torch::stable::parallel_for(0, threads < count ? threads : count, 1, [&](int64_t, int64_t) {
        const cpu::FlushedDenormals flushed;
        kernel(params, queue);
    });
}
const cpu::RowKernels& row_kernels() { return *kernels_in_use.load(); }
const cpu::SetKernels& set_kernels() { return row_kernels().sets; }

int64_t chunks_of(int64_t count) {
    return (count + cpu::kTokensPerChunk - 1) / cpu::kTokensPerChunk;
}
template <typename Chunk>
void run_chunks(int64_t count, Chunk chunk) {
    torch::stable::parallel_for(0, chunks_of(count), 1, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) chunk(k);
    });
}

struct Cpu {
    static void row_pass(const RowPassParams& params, const Tensor&) {
        advise_large_pages(params.rows);
        run_queue(params.rows.count(), params,
                  params.rows.are_sets() ? set_kernels().pass : row_kernels().row_pass);
    }
    static void row_gradient(const RowGradientParams& params, const Tensor&) {
        if (params.only == nullptr) advise_large_pages(params.rows);
        run_queue(params.rows.count(), params,
                  params.rows.are_sets() ? set_kernels().gradient : row_kernels().row_gradient);
    }
    static void sample_rows(const SampleParams& params, const Tensor&) {
        run_queue(params.rows.count(), params, row_kernels().sample);
    }
    static void scale(const LogitRows& rows, const float* factor, const Tensor&) {
        if (*factor == 1.0f) return;
        run_queue(rows.count(), cpu::ScaleParams{rows, *factor}, row_kernels().scale);
    }
    static void prepare(const PrepareParams& params, const Tensor&) {
        TokenCounts counts{};
        std::vector<int64_t> sequence_counts;
        if (needs_counts(params)) {
            sequence_counts.resize(params.sequences);
            cpu::count_tokens(params, counts, sequence_counts.data());
        }
        run_chunks(params.count(), [&](int64_t chunk) {
            cpu::prepare_chunk(params, chunk, counts, sequence_counts.data());
        });
        if (params.ticket) *params.ticket = 0;
    }
    static void sequence_mean(const SequenceMeanParams& params, const Tensor&) {
        const auto some = [&](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; ++k) cpu::sequence_mean(params, k);
        };
        torch::stable::parallel_for(0, span_count(params.sequences), 1, some);
    }
    static void contributions(const ContributionParams& params, const Tensor&) {
        const int64_t bins = params.grids.bins();
        const int64_t chunks = chunks_of(params.count);
        std::vector<Moments> partials(chunks * bins);
        run_chunks(params.count, [&](int64_t chunk) {
            cpu::contributions_chunk(params, chunk, &partials[chunk * bins]);
        });
        cpu::contributions_reduce(params, partials.data(), chunks);
    }
    static void solve(const SolveParams& params, const Tensor&) { cpu::solve(params); }
    static void search(ContributionParams params, const Target& target, const SearchResult& result,
                       const Tensor& like) {
        std::vector<double> table(params.grids.points());
        params.table = table.data();
        contributions(params, like);
        cpu::solve({table.data(), 1, params.grids, target, result});
    }
    static void token_loss(const TokenLossParams& params, const Tensor&) {
        const int64_t chunks = chunks_of(params.count);
        std::vector<TokenLossSums> partials(chunks);
        run_chunks(params.count,
                   [&](int64_t chunk) { cpu::token_loss_chunk(params, chunk, partials[chunk]); });
        cpu::token_loss_reduce(params, partials.data(), chunks);
    }

    static void find_labels(const FindLabelsParams& params, const Tensor&) {
        const int64_t count = params.sets.rows * params.labels_per_row;
        run_chunks(count, [&](int64_t chunk) { cpu::find_labels_chunk(params, chunk); });
    }
    template <typename Params, auto kernel>
    static void over_sets(const Params& params, const Tensor&) {
        run_queue(params.sets.rows, params, set_kernels().*kernel);
    }
    static constexpr auto gather_sets = over_sets<MoveSetsParams, &cpu::SetKernels::gather>;
    static constexpr auto scatter_sets = over_sets<MoveSetsParams, &cpu::SetKernels::scatter>;
    static constexpr auto multiply_sets = over_sets<MultiplySetsParams, &cpu::SetKernels::multiply>;
    static constexpr auto sets_dhidden =
        over_sets<SetHiddenGradientParams, &cpu::SetKernels::dhidden>;
    static void head_sets_pass(const HeadSetPassParams& params, const Tensor&) {
        run_queue(params.pass.rows.rows, params, set_kernels().head_pass);
    }
    // A part of the values per thread, if they have more values than columns.
    static void sort_sets(const SortSetsParams& params) {
        const int64_t count = params.sets.count, bins = params.columns.count + 2;
        const int64_t parts = std::min<int64_t>(torch::stable::get_num_threads(), 1 + count / bins);
        std::vector<int64_t> places(parts * bins);
        const auto over_parts = [&](auto kernel) {
            const auto some = [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                    kernel(params, count * i / parts, count * (i + 1) / parts, &places[i * bins]);
                }
            };
            torch::stable::parallel_for(0, parts, 1, some);
        };
        over_parts(cpu::count_columns);
        int64_t total = 0;
        for (int64_t bin = 0; bin < bins; ++bin) {
            if (bin > 0) params.segments[bin - 1] = total;
            for (int64_t i = 0; i < parts; ++i) {
                total += std::exchange(places[i * bins + bin], total);
            }
        }
        over_parts(cpu::sort_values);
    }
    static void sets_dweight(const SetWeightGradientParams& params, const Tensor&) {
        const Matrix& dweight = params.dweight;
        if (!params.add) {
            advise_large_pages(dweight.data, dweight.rows * dweight.columns, dweight.dtype);
        }
        run_queue(dweight.rows, params, set_kernels().dweight);
    }
};

void sort_sets(Tensor token_ids, Tensor offsets, binding::OptionalTensor shard, Tensor order,
               Tensor rows, Tensor segments) {
    const binding::Reader read(token_ids);
    const Sets sets = read.sets(offsets, token_ids, token_ids.numel());
    const int64_t V = segments.numel() - 1;
    STD_TORCH_CHECK(V >= 0, "segments must not be empty");
    Cpu::sort_sets({sets, binding::columns_of(read, V, shard),
                    read.data<int64_t>(order, sets.count, "order"),
                    read.data<int32_t>(rows, sets.count, "rows"),
                    read.data<int64_t>(segments, V + 1, "segments")});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(BAPO_NAMESPACE, CPU, m) {
    binding::register_operators<Cpu>(m);
    m.impl("sort_sets", TORCH_BOX(&sort_sets));
}

STABLE_TORCH_LIBRARY_IMPL(BAPO_NAMESPACE, CompositeExplicitAutograd, m) {
    m.impl("instruction_set", TORCH_BOX(&instruction_set));
    m.impl("layout", TORCH_BOX(&layout));
}
