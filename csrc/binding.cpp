// Registers the CPU kernels as the ops that bapo_kernels/_ops.py defines. Checks what memory safety
// needs; friendly messages are the business of the Python layer.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "launch.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using namespace bapo;

template <typename T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;
template <>
constexpr ScalarType kScalarType<bool> = ScalarType::Bool;
template <>
constexpr ScalarType kScalarType<uint8_t> = ScalarType::Byte;

// The data of a contiguous tensor of so many elements.
template <typename T>
T* data(const Tensor& tensor, int64_t count, const char* name) {
    STD_TORCH_CHECK(tensor.scalar_type() == kScalarType<T> && tensor.is_contiguous() &&
                        tensor.numel() == count && tensor.is_cpu(),
                    name, " must be a contiguous CPU tensor of ", count,
                    " elements in the dtype of the schema");
    return static_cast<T*>(tensor.data_ptr());
}
template <typename T>
T* data(const OptionalTensor& tensor, int64_t count, const char* name) {
    return tensor ? data<T>(*tensor, count, name) : nullptr;
}

DType row_dtype(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::BFloat16: return DType::kBFloat16;
        case ScalarType::Half: return DType::kFloat16;
        default: STD_TORCH_CHECK(false, "logits must be float32, bfloat16 or float16");
    }
}

void check_rows(const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(
        tensor.dim() == 3 && tensor.is_cpu() && (tensor.size(2) <= 1 || tensor.stride(2) == 1),
        name, " must be a 3-dimensional CPU tensor with last stride 1");
}

LogitRows logit_rows(const Tensor& logits, const OptionalTensor& dlogits, double temperature,
                     double logit_scale, std::optional<double> softcap) {
    check_rows(logits, "logits");
    LogitRows rows{};
    rows.dtype = row_dtype(logits);
    rows.batches = logits.size(0);
    rows.rows = logits.size(1);
    rows.vocab = logits.size(2);
    rows.logits = logits.data_ptr();
    rows.batch_stride = logits.stride(0);
    rows.row_stride = logits.stride(1);
    if (dlogits) {
        check_rows(*dlogits, "dlogits");
        for (int64_t dim = 0; dim < 3; ++dim) {
            STD_TORCH_CHECK(dlogits->size(dim) == logits.size(dim),
                            "dlogits must have the shape of logits");
        }
        STD_TORCH_CHECK(dlogits->scalar_type() == logits.scalar_type(),
                        "dlogits must have the dtype of logits");
        rows.grad = dlogits->data_ptr();
        rows.grad_batch_stride = dlogits->stride(0);
        rows.grad_row_stride = dlogits->stride(1);
    }
    const double slope = logit_scale / temperature;
    const double scale = softcap ? *softcap / temperature : slope;
    rows.transform = {softcap.has_value(), logit_scale, softcap.value_or(0.0), scale, slope};
    return rows;
}

// The row kernels in use: the widest that run here, unless a test asks for others.
std::atomic<const cpu::RowKernels*> kernels_in_use{&cpu::row_kernels()};

std::string instruction_set(std::string name) {
    if (!name.empty()) {
        const cpu::RowKernels* found = cpu::row_kernels(name.c_str());
        STD_TORCH_CHECK(found != nullptr, "instruction set must be one that runs here, got ", name);
        kernels_in_use = found;
    }
    return kernels_in_use.load()->isa;
}

// Large pages make the first touch of a fresh gradient several times cheaper.
void advise_large_pages([[maybe_unused]] const LogitRows& rows) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (rows.grad == nullptr || rows.grad == rows.logits) return;
    constexpr uintptr_t kPage = uintptr_t{1} << 21;
    const uintptr_t element = rows.dtype == DType::kFloat32 ? 4 : 2;
    const auto address = reinterpret_cast<uintptr_t>(rows.grad);
    const uintptr_t bytes = (uintptr_t)(rows.batches * rows.rows * rows.vocab) * element;
    const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
    const uintptr_t end = (address + bytes) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

TokenInputs token_inputs(int64_t count, const Tensor& live, const OptionalTensor& old_log_probs,
                         const OptionalTensor& advantages, const OptionalTensor& weights,
                         const OptionalTensor& is_weights, const OptionalTensor& ref_log_probs) {
    return {
        data<bool>(live, count, "live"),
        data<float>(old_log_probs, count, "old_log_probs"),
        data<float>(advantages, count, "advantages"),
        data<double>(weights, count, "weights"),
        data<float>(is_weights, count, "rollout_is_weights"),
        data<float>(ref_log_probs, count, "ref_log_probs"),
    };
}

PolicyOptions policy_options(std::optional<double> clip_ratio_c, double kl_loss_coef,
                             int64_t kl_loss_type, double entropy_coef) {
    const double no_cap = std::numeric_limits<double>::infinity();
    return {clip_ratio_c.value_or(no_cap), kl_loss_coef, kl_loss_type, entropy_coef};
}

template <typename Params>
void run_rows(const Params& params,
              void (*cpu::RowKernels::*kernel)(const Params&, cpu::RowQueue&)) {
    const int64_t count = params.rows.batches * params.rows.rows;
    const int64_t threads = torch::stable::get_num_threads();
    constexpr int64_t kGrainsPerThread = 8;
    const int64_t grain = count / (threads * kGrainsPerThread);
    cpu::RowQueue queue{count, grain > 0 ? grain : 1};
    torch::stable::parallel_for(0, threads < count ? threads : count, 1, [&](int64_t, int64_t) {
        (kernels_in_use.load()->*kernel)(params, queue);
    });
}

template <typename Partial, typename Chunk>
std::vector<Partial> run_chunks(int64_t count, int64_t width, Chunk chunk) {
    const int64_t chunks = (count + cpu::kTokensPerChunk - 1) / cpu::kTokensPerChunk;
    std::vector<Partial> partials(chunks * width);
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) chunk(k, &partials[k * width]);
    });
    return partials;
}

void row_pass(Tensor logits, Tensor labels, Tensor live, OptionalTensor old_log_probs,
              OptionalTensor advantages, OptionalTensor weights, OptionalTensor rollout_is_weights,
              OptionalTensor ref_log_probs, OptionalTensor bounds, double lower_start,
              double lower_max, double upper_start, double upper_max,
              std::optional<double> clip_ratio_c, double kl_loss_coef, int64_t kl_loss_type,
              double entropy_coef, double temperature, double logit_scale,
              std::optional<double> softcap, Tensor log_probs, Tensor entropy, Tensor stats,
              OptionalTensor dlogits, OptionalTensor undecided) {
    RowPassParams params{};
    params.rows = logit_rows(logits, dlogits, temperature, logit_scale, softcap);
    const int64_t N = params.rows.batches * params.rows.rows;
    params.labels = data<int64_t>(labels, N, "labels");
    params.tokens = token_inputs(N, live, old_log_probs, advantages, weights, rollout_is_weights,
                                 ref_log_probs);
    params.options = policy_options(clip_ratio_c, kl_loss_coef, kl_loss_type, entropy_coef);
    params.bounds = data<float>(bounds, 2, "bounds");
    // Bounds are applied as float32: so are the ends of their ranges.
    params.first = {(float)lower_start, (float)upper_start};
    params.last = {(float)lower_max, (float)upper_max};
    params.log_probs = data<double>(log_probs, N, "log_probs");
    params.entropy = data<double>(entropy, N, "entropy");
    params.stats = data<double>(stats, 2 * N, "stats");
    params.undecided = data<uint8_t>(undecided, N, "undecided");
    STD_TORCH_CHECK(params.rows.grad == nullptr ||
                        (params.tokens.advantages && params.tokens.weights && params.undecided),
                    "dlogits needs advantages, weights and undecided");
    advise_large_pages(params.rows);
    run_rows(params, &cpu::RowKernels::row_pass);
}

void row_pass_(Tensor logits, Tensor labels, Tensor live, OptionalTensor old_log_probs,
               OptionalTensor advantages, OptionalTensor weights, OptionalTensor rollout_is_weights,
               OptionalTensor ref_log_probs, OptionalTensor bounds, double lower_start,
               double lower_max, double upper_start, double upper_max,
               std::optional<double> clip_ratio_c, double kl_loss_coef, int64_t kl_loss_type,
               double entropy_coef, double temperature, double logit_scale,
               std::optional<double> softcap, Tensor log_probs, Tensor entropy, Tensor stats,
               OptionalTensor undecided) {
    row_pass(logits, labels, live, old_log_probs, advantages, weights, rollout_is_weights,
             ref_log_probs, bounds, lower_start, lower_max, upper_start, upper_max, clip_ratio_c,
             kl_loss_coef, kl_loss_type, entropy_coef, temperature, logit_scale, softcap, log_probs,
             entropy, stats, logits, undecided);
}

void row_gradient(Tensor logits, Tensor labels, Tensor stats, Tensor entropy, Tensor dlog_probs,
                  OptionalTensor dentropy, OptionalTensor only, double temperature,
                  double logit_scale, std::optional<double> softcap, Tensor dlogits) {
    RowGradientParams params{};
    params.rows = logit_rows(logits, dlogits, temperature, logit_scale, softcap);
    const int64_t N = params.rows.batches * params.rows.rows;
    params.labels = data<int64_t>(labels, N, "labels");
    params.stats = data<double>(stats, 2 * N, "stats");
    params.entropy = data<double>(entropy, N, "entropy");
    params.dlog_probs = data<double>(dlog_probs, N, "dlog_probs");
    params.dentropy = data<double>(dentropy, N, "dentropy");
    params.only = data<uint8_t>(only, N, "only");
    if (params.only == nullptr) advise_large_pages(params.rows);
    run_rows(params, &cpu::RowKernels::row_gradient);
}

void row_gradient_(Tensor logits, Tensor labels, Tensor stats, Tensor entropy, Tensor dlog_probs,
                   OptionalTensor dentropy, OptionalTensor only, double temperature,
                   double logit_scale, std::optional<double> softcap) {
    row_gradient(logits, labels, stats, entropy, dlog_probs, dentropy, only, temperature,
                 logit_scale, softcap, logits);
}

int64_t grid_points(const Grid& grid) {
    double points[kMaxGridPoints];
    return fill_grid(grid, points);
}

void contributions(Tensor log_probs, Tensor live, OptionalTensor old_log_probs, Tensor advantages,
                   OptionalTensor rollout_log_probs, double lower_start, double lower_max,
                   double lower_step, double upper_start, double upper_max, double upper_step,
                   bool uniform_weight, bool gradient, Tensor table) {
    ContributionParams params{};
    const int64_t N = params.count = log_probs.numel();
    params.log_probs = data<double>(log_probs, N, "log_probs");
    params.tokens = token_inputs(N, live, old_log_probs, advantages, {}, {}, {});
    params.rollout_log_probs = data<float>(rollout_log_probs, N, "rollout_log_probs");
    params.lower = {lower_start, lower_max, lower_step};
    params.upper = {upper_start, upper_max, upper_step};
    params.uniform_weight = uniform_weight;
    params.gradient = gradient;
    const int64_t points = grid_points(params.lower) + grid_points(params.upper);
    params.table = data<double>(table, points, "table");
    const auto partials = run_chunks<Moments>(
        N, cpu::contribution_bins(params),
        [&](int64_t k, Moments* bins) { cpu::contributions_chunk(params, k, bins); });
    const int64_t chunks = (int64_t)partials.size() / cpu::contribution_bins(params);
    cpu::contributions_reduce(params, partials.data(), chunks);
}

void solve(Tensor table, double lower_start, double lower_max, double lower_step,
           double upper_start, double upper_max, double upper_step, double target,
           bool ratio_target, bool upper_first, Tensor bounds, Tensor shares) {
    const Grid lower{lower_start, lower_max, lower_step}, upper{upper_start, upper_max, upper_step};
    cpu::solve(data<double>(table, grid_points(lower) + grid_points(upper), "table"), lower, upper,
               {target, ratio_target, upper_first}, data<float>(bounds, 2, "bounds"),
               data<double>(shares, 4, "shares"));
}

constexpr int64_t kReportSize = 14;

void policy(Tensor log_probs, OptionalTensor entropy, Tensor live, OptionalTensor old_log_probs,
            Tensor advantages, Tensor weights, OptionalTensor rollout_is_weights,
            OptionalTensor ref_log_probs, OptionalTensor rollout_log_probs, Tensor bounds,
            OptionalTensor shares, double lower_start, double upper_start, bool uniform_weight,
            bool gradient, double target, bool ratio_target, std::optional<double> clip_ratio_c,
            double kl_loss_coef, int64_t kl_loss_type, double entropy_coef, Tensor report,
            OptionalTensor dlog_probs, OptionalTensor dentropy) {
    PolicyParams params{};
    const int64_t N = params.count = log_probs.numel();
    params.log_probs = data<double>(log_probs, N, "log_probs");
    params.entropy = data<double>(entropy, N, "entropy");
    params.tokens = token_inputs(N, live, old_log_probs, advantages, weights, rollout_is_weights,
                                 ref_log_probs);
    params.rollout_log_probs = data<float>(rollout_log_probs, N, "rollout_log_probs");
    params.options = policy_options(clip_ratio_c, kl_loss_coef, kl_loss_type, entropy_coef);
    params.uniform_weight = uniform_weight;
    params.gradient = gradient;
    params.first = {lower_start, upper_start};
    params.target = {target, ratio_target, false};
    params.bounds = data<float>(bounds, 2, "bounds");
    params.shares = data<double>(shares, 4, "shares");
    params.report = data<float>(report, kReportSize, "report");
    params.dlog_probs = data<double>(dlog_probs, N, "dlog_probs");
    params.dentropy = data<double>(dentropy, N, "dentropy");
    const auto partials = run_chunks<PolicySums>(
        N, 1, [&](int64_t k, PolicySums* sums) { cpu::policy_chunk(params, k, *sums); });
    cpu::policy_reduce(params, partials.data(), (int64_t)partials.size());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bapo_kernels, CPU, m) {
    m.impl("row_pass", TORCH_BOX(&row_pass));
    m.impl("row_pass_", TORCH_BOX(&row_pass_));
    m.impl("row_gradient", TORCH_BOX(&row_gradient));
    m.impl("row_gradient_", TORCH_BOX(&row_gradient_));
    m.impl("contributions", TORCH_BOX(&contributions));
    m.impl("solve", TORCH_BOX(&solve));
    m.impl("policy", TORCH_BOX(&policy));
}

STABLE_TORCH_LIBRARY_IMPL(bapo_kernels, CompositeExplicitAutograd, m) {
    m.impl("instruction_set", TORCH_BOX(&instruction_set));
}
