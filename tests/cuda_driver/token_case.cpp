#include <algorithm>

#include "cases.h"
#include "cuda/launch_cuda.h"
#include "tokens.h"

namespace driver {

using namespace bapo;

namespace {

struct TokenCase {
    const char* name;
    bool uniform_weight = false;
    bool unclipped_only = false;   // contributions, else all that are held at the bounds
    bool target_is_ratio = false;  // pos/neg, else pos/(pos + neg)
    bool upper_first = false;
    bool all_inputs = true;  // old, reference and rollout log-probs, importance weights
    int64_t surrogate = kClip;
    bool own_bounds = false;  // of each token, at which the loss is taken
    bool log_ratios = false;  // given, as those of sequences are
};
constexpr TokenCase kCases[] = {
    {.name = "lower first"},
    {.name = "upper first, uniform weight", .uniform_weight = true, .upper_first = true},
    {.name = "own bounds", .own_bounds = true},
    {.name = "own bounds, log-ratios", .own_bounds = true, .log_ratios = true},
    {.name = "cispo", .surrogate = kCispo, .own_bounds = true},
    {.name = "cispo, log-ratios", .surrogate = kCispo, .own_bounds = true, .log_ratios = true},
    {.name = "sapo", .surrogate = kSapo},
    {.name = "sapo, log-ratios", .surrogate = kSapo, .log_ratios = true},
    {.name = "mask", .surrogate = kMask, .own_bounds = true},
    {.name = "mask, log-ratios", .surrogate = kMask, .own_bounds = true, .log_ratios = true},
    // Not quick.
    {.name = "ratio", .unclipped_only = true, .target_is_ratio = true, .all_inputs = false},
    {.name = "upper first, unclipped only", .unclipped_only = true, .upper_first = true},
};

const Grids kGrids{Grid::of(0.6f, 0.9f, 0.02), Grid::of(1.2f, 3.0f, 0.05)};
const int kFirstUpper = kGrids.lower.count, kLastLower = kFirstUpper - 1,
          kLastUpper = kGrids.points() - 1;

// A sum and the magnitude of its terms, to which its tolerance is proportional.
struct Sum {
    double value = 0.0, size = 0.0;
    void add(double term) {
        value += term;
        size += std::fabs(term);
    }
    Sum over(double count) const { return {value / count, size / count}; }
    operator Value() const { return {value, kDouble * size}; }
};

Value near(double value, double tiny = 0.0) { return {value, kDouble * std::fabs(value) + tiny}; }

// Of both grids, as the table has them.
std::vector<double> grid_points() {
    std::vector<double> points;
    for (const Grid& grid : {kGrids.lower, kGrids.upper}) {
        double sum = grid.start;
        for (int k = 0; k < grid.count; ++k, sum += grid.step) points.push_back(grid.point(k, sum));
    }
    return points;
}

// Inputs by token; those of skipped ones are NaN.
bool is_counted(int64_t i) { return i % 5 != 3; }
double poison(int64_t i) { return is_counted(i) ? 0.0 : NAN; }
auto drawn(int64_t which, double low, double high) {
    return [=](int64_t i) { return uniform(7, 16 * i + which, low, high) + poison(i); };
}
const auto log_prob = drawn(0, -6.0, -0.1);
auto near_log_prob(int64_t which, double low, double high) {
    return [=](int64_t i) { return log_prob(i) + drawn(which, low, high)(i); };
}

class Tokens {
  public:
    Tokens(const TokenCase& of, int64_t count, Verdict& verdict)
        : case_(of), count_(count), verdict_(verdict) {}

    void run() {
        search();
        launch();
        verdict_.compare("table entry", table_of_kernel_, table_);
        verdict_.compare("share", masses_, masses());
        verdict_.compare("bound", bounds_, std::vector<Value>{{found_.lower}, {found_.upper}});
        check_loss();
        verdict_.again([&] { launch(); });
    }

  private:
    // On the device or on the host.
    TokenInputs inputs(bool on_host) const {
        const auto at = [=](const auto& of, bool given = true) {
            return !given ? nullptr : on_host ? of.host.data() : of.data();
        };
        const bool all = case_.all_inputs, own = case_.own_bounds;
        return TokenInputs((const bool*)at(counted_), at(weights_),
                           at(log_ratios_, case_.log_ratios), at(advantages_), at(old_, all),
                           at(rollout_, all), at(rollout_is_weights_, all), at(ref_, all),
                           at(lower_bounds_, own), at(upper_bounds_, own));
    }
    Ratio ratio(int64_t i, const Token& of) const {
        return ratio_at(host_, i, of.log_prob, of.old_log_prob);
    }
    // What a token adds to the mass of its sign.
    double mass(int64_t i, const Bounds& bounds) const {
        const Token of = token_at(host_, i, log_probs_[i]);
        return search_weight(host_, case_.uniform_weight, i, of.old_log_prob) *
               contribution(ratio(i, of).value, of.advantage, bounds, case_.unclipped_only);
    }
    double quantity(size_t lower, size_t upper) const {
        return tested_quantity(table_[upper].value, table_[lower].value, case_.target_is_ratio);
    }
    // Positive and negative mass at the bounds that are found, the first ones and the last ones.
    std::vector<Sum> masses() const {
        return {table_[upper_], table_[lower_],     table_[kFirstUpper],
                table_[0],      table_[kLastUpper], table_[kLastLower]};
    }

    // The table, a target that is reached midway, and where Algorithm 1 stops.
    void search() {
        parallel((int64_t)points_.size(), [&](int64_t k) {
            for (int64_t i = 0; i < count_; ++i) {
                const double A = counted_[i] ? advantages_[i] : 0.0;
                if (k < kFirstUpper ? A < 0.0 : A > 0.0) {
                    table_[k].add(mass(i, {points_[k], points_[k]}));
                }
            }
        });
        const double middle = case_.upper_first
                                  ? quantity(kLastLower / 2, kLastUpper)
                                  : quantity(kLastLower, (kFirstUpper + kLastUpper) / 2);
        target_.value = std::isfinite(middle) ? middle * (1.0 + 1e-6) : 0.5;

        const auto climb = [&](int& at, int last) {
            while (at < last && quantity(lower_, upper_) < target_.value) ++at;
        };
        if (case_.upper_first) climb(upper_, kLastUpper);
        climb(lower_, kLastLower);
        if (!case_.upper_first) climb(upper_, kLastUpper);
        found_ = {(float)points_[lower_], (float)points_[upper_]};
    }

    ContributionParams params() const {
        return ContributionParams(count_, log_probs_.data(), inputs(false), kGrids,
                                  case_.uniform_weight, case_.unclipped_only,
                                  table_of_kernel_.data(), /*ranks=*/1, /*rank=*/0);
    }
    void launch() {
        Memory::reset_all();
        const ContributionParams search = params();
        const SearchResult result{bounds_.data(), masses_.data()};
        Moments* const partials = search_partials_.data();
        finish(cuda::contributions(search, partials, nullptr));
        finish(cuda::solve({table_of_kernel_.data(), 1, kGrids, target_, result}, nullptr));
        const auto of_table = std::pair(bounds_.values(), masses_.values());
        finish(cuda::search(search, target_, result, partials, nullptr));
        if (std::pair(bounds_.values(), masses_.values()) != of_table) {
            verdict_.fail(0, "search is not contributions and solve");
        }
        const TokenLossParams loss(
            count_, search.log_probs, entropy_.data(), search.tokens, options_,
            case_.uniform_weight, case_.unclipped_only, kGrids.start(), kGrids.last(), target_,
            bounds_.data_if(!case_.own_bounds), masses_.data_if(case_.all_inputs),
            /*unmasked=*/nullptr, ticket_.data(), reinterpret_cast<Report*>(report_.data()),
            dlog_probs_.data(), dentropy_.data(), outputs_.data(),
            dlog_ratios_.data_if(case_.log_ratios));
        finish(cuda::token_loss(loss, loss_partials_.data(), nullptr));
        if (ticket_.values()[0] != 0) verdict_.fail(0, "the ticket of the loss is not 0");
        verdict_.guards();
    }

    void check_loss() {
        Sum loss, pg_loss, kl_loss, minus_log_ratio, entropy, lower, upper;
        std::vector<Sum> masses(kMasses);
        double count = 0.0, clipped = 0.0, dual_clipped = 0.0;
        std::vector<Value> outputs(2 * count_), dlog_probs(count_, near(0.0, 0x1p-60)),
            dlog_ratios(count_, {case_.log_ratios ? 0.0 : NAN}), dentropy(count_);
        for (int64_t i = 0; i < count_; ++i) {
            if (!counted_[i]) continue;
            const Token of = token_at(host_, i, log_probs_[i]);
            const Ratio ratio = this->ratio(i, of);
            const Bounds bounds =
                case_.own_bounds ? Bounds{lower_bounds_[i], upper_bounds_[i]} : found_;
            const PolicyTerm term = policy_term(of, ratio, bounds, options_);
            const double weight = weights_[i], bonus = weight * options_.entropy_coef;
            const double kl = kl_term(of.log_prob, of.ref_log_prob, options_.kl_loss_type).value;
            pg_loss.add(weight * term.loss);
            kl_loss.add(weight * kl);
            loss.add(weight * (term.loss + options_.kl_loss_coef * kl));
            loss.add(-bonus * entropy_[i]);
            minus_log_ratio.add(-ratio.log_value);
            entropy.add(entropy_[i]);
            lower.add(bounds.lower);
            upper.add(bounds.upper);
            count += 1.0;
            clipped += term.clipped;
            dual_clipped += term.dual_clipped;
            const Bounds tried[] = {bounds, kGrids.start(), kGrids.last()};
            for (int k = 0; k < 3 && of.advantage != 0.0; ++k) {
                masses[2 * k + (of.advantage < 0.0)].add(mass(i, tried[k]));
            }
            const double of_policy = weight * term.grad, of_kl = weight * kl_grad(of, options_);
            outputs[i] = {(float)of.log_prob};
            outputs[count_ + i] = {(float)entropy_[i]};
            dlog_probs[i] = near(case_.log_ratios ? of_kl : of_policy + of_kl, 0x1p-60);
            if (case_.log_ratios) dlog_ratios[i] = near(of_policy);
            dentropy[i] = near(-bonus);
        }
        verdict_.compare("log_prob or entropy of token", outputs_, outputs);
        verdict_.compare("dlog_prob of token", dlog_probs_, dlog_probs);
        verdict_.compare("dlog_ratio of token", dlog_ratios_, dlog_ratios);
        verdict_.compare("dentropy of token", dentropy_, dentropy);

        // Those of the table are at bounds that are not rounded to float32.
        if (case_.all_inputs) masses = this->masses();
        const double pos = masses[0].value, neg = masses[1].value, neg_start = masses[3].value;
        const double neg_last = case_.unclipped_only ? masses[5].value : neg_start;
        const double tokens = std::max(count, 1.0);
        const auto share = [](double p, double n) {
            return Sum{p + n == 0.0 ? 0.0 : p / (p + n), 1.0};
        };
        const std::vector<Sum> expected{
            loss,
            pg_loss,
            {clipped / tokens, 1.0},
            {dual_clipped / tokens, 1.0},
            minus_log_ratio.over(tokens),
            entropy.over(tokens),
            kl_loss,
            lower.over(tokens),
            upper.over(tokens),
            share(pos, neg),
            share(masses[2].value, neg_start),
            share(masses[4].value, neg_last),
            {tested_quantity(pos, neg, true), 1.0},
            {(double)(tested_quantity(pos, neg, case_.target_is_ratio) < target_.value), 0.0},
            {count, 0.0},
        };
        verdict_.compare("report entry", report_, expected, 0x1p-24);
    }

    const TokenCase case_;
    const int64_t count_;
    Verdict& verdict_;
    const PolicyOptions options_{case_.surrogate, 3.0, 0.7, 1.5, 0.1, count_ % 3, 0.01};
    Target target_{0.0, case_.target_is_ratio, case_.upper_first};
    const std::vector<double> points_ = grid_points();
    std::vector<Sum> table_ = std::vector<Sum>(points_.size());
    int lower_ = 0, upper_ = kFirstUpper;  // where the search is
    Bounds found_{};

    const Array<uint8_t> counted_{"counted", count_, is_counted};
    const Array<double> log_probs_{"log_probs", count_, log_prob},
        entropy_{"entropy", count_, drawn(1, 0.0, 9.0)},
        weights_{"weights", count_, [&](int64_t i) { return drawn(2, 0.5, 1.5)(i) / count_; }},
        log_ratios_{"log_ratios", count_, drawn(8, -1.5, 1.5)};
    const Array<float> old_{"old_log_probs", count_,
                            [](int64_t i) { return log_prob(i) - drawn(3, -1.5, 1.5)(i); }},
        ref_{"ref_log_probs", count_, near_log_prob(4, -1.0, 1.0)},
        rollout_{"rollout_log_probs", count_, near_log_prob(5, -0.5, 0.5)},
        advantages_{"advantages", count_,
                    [](int64_t i) { return i % 7 == 5 ? 0.0 : drawn(6, -1.0, 1.0)(i); }},
        rollout_is_weights_{"rollout_is_weights", count_, drawn(7, 0.5, 2.0)},
        lower_bounds_{"lower", count_, drawn(9, 0.6, 1.0)},
        upper_bounds_{"upper", count_, drawn(10, 1.0, 2.0)};
    const TokenInputs host_ = inputs(true);
    const Array<int32_t> ticket_{"ticket", std::vector<int32_t>{0}};
    const Array<double> table_of_kernel_{"table", std::vector(table_.size(), 0.0)},
        masses_{"masses", kMasses}, dlog_probs_{"dlog_probs", count_},
        dlog_ratios_{"dlog_ratios", count_}, dentropy_{"dentropy", count_},
        loss_partials_{"partials of the loss", cuda::token_loss_partials(count_)};
    const Array<Moments> search_partials_{"partials of the search",
                                          cuda::search_partials(params())};
    const Array<float> bounds_{"bounds", 2}, report_{"report", kReportSize},
        outputs_{"outputs", 2 * count_};
};

// Rows of one token, more than there are blocks, or two long ones; or packed sequences of 0, 1, 2,
// 700, 0, ... tokens, the last of which is cut short, and tokens behind them.
std::vector<int64_t> offsets_of(int64_t tokens, bool packed) {
    const int64_t lengths[] = {0, 1, 2, 700}, row = tokens > 2'000 ? tokens / 2 : 1;
    const int64_t end = packed ? (9 * tokens + 9) / 10 : tokens;
    std::vector<int64_t> offsets{0};
    while (offsets.back() < end) {
        const int64_t length = packed ? lengths[(offsets.size() - 1) % 4] : row;
        offsets.push_back(std::min(offsets.back() + length, end));
    }
    return offsets;
}

// Packed: sequences between offsets, else rows of one length.
void run_sequences(int64_t tokens, bool packed, Verdict& verdict) {
    const Array<uint8_t> counted("counted", tokens, is_counted);
    const Array<double> values("values", tokens,
                               [](int64_t i) { return uniform(8, 3 * i, -6.0, -0.1) + poison(i); });
    const Array<float> old("old_log_probs", tokens,
                           [](int64_t i) { return uniform(8, 3 * i + 1, -6.0, -0.1) + poison(i); });
    const Array<int64_t> offsets("offsets", offsets_of(tokens, packed));
    const Array<double> out("out", tokens,
                            [](int64_t i) { return uniform(8, 3 * i + 2, -1.0, 1.0); });
    const auto sequence_of = [&](int64_t i) {
        return std::ranges::upper_bound(offsets.host, i) - offsets.host.begin() - 1;
    };
    for (const bool forward : {true, false}) {
        const auto launch = [&] {
            Memory::reset_all();
            const Numbers at = packed ? Numbers{offsets.data(), DType::kInt64, 0, 1} : Numbers{};
            const SequenceMeanParams params(
                {tokens, offsets[1], at, (int64_t)offsets.host.size() - 1},
                (const bool*)counted.data(), forward, values.data(), old.data_if(forward),
                out.data());
            finish(cuda::sequence_mean(params, nullptr));
            verdict.guards();
        };
        launch();
        std::vector<Sum> sums(offsets.host.size());
        std::vector<double> counts(sums.size());
        for (int64_t i = 0; i < tokens; ++i) {
            if (!counted[i]) continue;
            sums[sequence_of(i)].add(forward ? values[i] - old[i] : values[i]);
            counts[sequence_of(i)] += 1.0;
        }
        std::vector<Value> expected;
        for (int64_t i = 0; i < tokens; ++i) {
            const int64_t k = sequence_of(i);
            const auto [mean, size] = counted[i] ? sums[k].over(counts[k]) : Sum{};
            const double before = forward ? 0.0 : out[i];
            expected.push_back({before + mean, kDouble * (size + std::fabs(before))});
        }
        verdict.compare(forward ? "log-ratio of token" : "gradient of token", out, expected);
        verdict.again(launch);
    }
}

}  // namespace

std::vector<Case> token_cases(bool quick) {
    std::vector<Case> cases;
    for (const int64_t count : {1, 255, 256, 257, quick ? 1'000 : 100'000}) {
        for (const TokenCase& of : kCases) {
            if (quick && of.unclipped_only) continue;
            cases.push_back({"tokens=" + std::to_string(count) + " " + of.name,
                             [=](Verdict& verdict) { Tokens(of, count, verdict).run(); }});
        }
    }
    for (const int64_t tokens : {1, quick ? 70 : 1'100, quick ? 3'000 : 100'000}) {
        for (const bool packed : {false, true}) {
            cases.push_back({"means over sequences, tokens=" + std::to_string(tokens) +
                                 (packed ? " packed" : " padded"),
                             [=](Verdict& verdict) { run_sequences(tokens, packed, verdict); }});
        }
    }
    return cases;
}

}  // namespace driver
