#include <algorithm>

#include "cases.h"
#include "cuda/launch_cuda.h"
#include "tokens.h"

namespace driver {

using namespace bapo;

namespace {

const Grids kGrids{Grid::of(0.6f, 0.9f, 0.02), Grid::of(1.2f, 3.0f, 0.05)};
// For sums in double in another order, whose terms may differ in the last bits of the exp.
constexpr double kDouble = 1e-13;

// A sum and the magnitude of its terms, to which its tolerance is proportional.
struct Sum {
    double value = 0.0, size = 0.0;
    void add(double term) {
        value += term;
        size += std::fabs(term);
    }
};

std::vector<double> grid_points(const Grid& grid) {
    std::vector<double> points;
    double sum = grid.start;
    for (int k = 0; k < grid.count; ++k, sum += grid.step) points.push_back(grid.point(k, sum));
    return points;
}

// Inputs by token; those of skipped ones are NaN.
bool is_counted(int64_t i) { return i % 5 != 3; }
auto drawn(int64_t which, double low, double high) {
    return [=](int64_t i) {
        return uniform(7, 16 * i + which, low, high) + (is_counted(i) ? 0.0 : NAN);
    };
}
const auto log_prob = drawn(0, -6.0, -0.1);
auto near(int64_t which, double low, double high) {
    return [=](int64_t i) { return log_prob(i) + drawn(which, low, high)(i); };
}

class Tokens {
  public:
    Tokens(const TokenCase& of, Verdict& verdict) : case_(of), verdict_(verdict) {
        options_.surrogate = of.surrogate;
        options_.kl_loss_type = of.count % 3;
        search();
    }
    void run();

  private:
    struct Outputs {
        std::vector<double> table, masses, dlog_probs, dlog_ratios, dentropy;
        std::vector<float> bounds, report, outputs;
    };
    Token token(int64_t i) const {
        const double log_prob = log_probs_[i];
        if (!case_.all_inputs) return {log_prob, log_prob, log_prob, advantages_[i], 1.0};
        return {log_prob, old_[i], ref_[i], advantages_[i], rollout_is_weights_[i]};
    }
    Ratio ratio(int64_t i) const {
        if (case_.log_ratios) return ratio_of(log_ratios_[i]);
        const Token of = token(i);
        return policy_ratio(of.log_prob, of.old_log_prob);
    }
    Bounds bounds(int64_t i) const {
        if (case_.own_bounds) return {own_bounds_[i], own_bounds_[count_ + i]};
        return {(float)lower_[at_lower_], (float)upper_[at_upper_]};
    }
    // What a token with an advantage adds to the mass of its sign.
    double mass(int64_t i, const Bounds& bounds) const {
        const double log_weight = case_.all_inputs ? rollout_[i] : log_probs_[i];
        return (case_.uniform_weight ? 1.0 : std::exp(log_weight)) *
               contribution(ratio(i).value, advantages_[i], bounds, case_.unclipped_only);
    }
    double quantity(size_t lower, size_t upper) const {
        return tested_quantity(table_[lower_.size() + upper].value, table_[lower].value,
                               case_.target_is_ratio);
    }
    // Positive and negative mass at the bounds that are found, the first ones and the last ones.
    std::vector<Sum> masses() const {
        const size_t uppers = lower_.size();
        return {
            table_[uppers + at_upper_], table_[at_lower_], table_[uppers], table_[0], table_.back(),
            table_[uppers - 1]};
    }
    void search();
    Outputs launch() const;
    void check_loss(const Outputs& got);

    const TokenCase case_;
    const int64_t count_ = case_.count;
    Verdict& verdict_;
    const std::vector<double> lower_ = grid_points(kGrids.lower),
                              upper_ = grid_points(kGrids.upper);
    PolicyOptions options_{kClip, 3.0, 0.7, 1.5, 0.1, kK1, 0.01};
    Target target_{0.0, case_.target_is_ratio, case_.upper_first};
    std::vector<Sum> table_ = std::vector<Sum>(lower_.size() + upper_.size());
    size_t at_lower_ = 0, at_upper_ = 0;

    const Input<uint8_t> counted_{"counted", count_, is_counted};
    const Input<double> log_probs_{"log_probs", count_, log_prob},
        entropy_{"entropy", count_, drawn(1, 0.0, 9.0)},
        weights_{"weights", count_, [&](int64_t i) { return drawn(2, 0.5, 1.5)(i) / count_; }},
        log_ratios_{"log_ratios", count_, drawn(8, -1.5, 1.5)};
    const Input<float> old_{"old_log_probs", count_,
                            [](int64_t i) { return log_prob(i) - drawn(3, -1.5, 1.5)(i); }},
        ref_{"ref_log_probs", count_, near(4, -1.0, 1.0)},
        rollout_{"rollout_log_probs", count_, near(5, -0.5, 0.5)},
        advantages_{"advantages", count_,
                    [](int64_t i) { return i % 7 == 5 ? 0.0 : drawn(6, -1.0, 1.0)(i); }},
        rollout_is_weights_{"rollout_is_weights", count_, drawn(7, 0.5, 2.0)},
        own_bounds_{"own bounds", 2 * count_, [&](int64_t k) {
                        return k < count_ ? drawn(9, 0.6, 1.0)(k) : drawn(10, 1.0, 2.0)(k - count_);
                    }};
};

// The table, a target that is reached midway, and where Algorithm 1 stops.
void Tokens::search() {
    parallel((int64_t)table_.size(), [&](int64_t point) {
        const bool is_upper = point >= (int64_t)lower_.size();
        const double bound = is_upper ? upper_[point - lower_.size()] : lower_[point];
        for (int64_t i = 0; i < count_; ++i) {
            const double A = advantages_[i];
            if (!counted_[i] || A == 0.0 || (A > 0.0) != is_upper) continue;
            table_[point].add(mass(i, {bound, bound}));
        }
    });
    const size_t last_lower = lower_.size() - 1, last_upper = upper_.size() - 1;
    const double middle = case_.upper_first ? quantity(last_lower / 2, last_upper)
                                            : quantity(last_lower, last_upper / 2);
    target_.value = std::isfinite(middle) ? middle * (1.0 + 1e-6) : 0.5;

    const auto climb = [&](size_t& at, size_t last) {
        while (at < last && quantity(at_lower_, at_upper_) < target_.value) ++at;
    };
    if (case_.upper_first) climb(at_upper_, last_upper);
    climb(at_lower_, last_lower);
    if (!case_.upper_first) climb(at_upper_, last_upper);
}

Tokens::Outputs Tokens::launch() const {
    const Input<double> table("table", std::vector(table_.size(), 0.0));
    const Input<int32_t> ticket("ticket", std::vector<int32_t>{0});
    const Array<double> masses("masses", kMasses), dlog_probs("dlog_probs", count_),
        dlog_ratios("dlog_ratios", count_), dentropy("dentropy", count_),
        loss_partials("partials of the loss", cuda::token_loss_partials(count_));
    const Array<float> bounds("bounds", 2), report("report", kReportSize),
        outputs("outputs", 2 * count_);

    ContributionParams search{};
    search.count = count_;
    search.log_probs = log_probs_.data();
    search.tokens.counted = (const bool*)counted_.data();
    search.tokens.advantages = advantages_.data();
    search.tokens.log_ratios = case_.log_ratios ? log_ratios_.data() : nullptr;
    search.grids = kGrids;
    search.uniform_weight = case_.uniform_weight;
    search.unclipped_only = case_.unclipped_only;
    search.table = table.data();
    search.ranks = 1;
    if (case_.all_inputs) {
        search.tokens.old_log_probs = old_.data();
        search.tokens.rollout_log_probs = rollout_.data();
    }
    const Array<double> search_partials(
        "partials of the search",
        cuda::search_partials(search) * (int64_t)(sizeof(Moments) / sizeof(double)));

    TokenLossParams loss{};
    loss.count = count_;
    loss.log_probs = log_probs_.data();
    loss.entropy = entropy_.data();
    loss.tokens = search.tokens;
    loss.tokens.weights = weights_.data();
    if (case_.all_inputs) {
        loss.tokens.rollout_is_weights = rollout_is_weights_.data();
        loss.tokens.ref_log_probs = ref_.data();
        loss.masses = masses.data();
    }
    if (case_.own_bounds) {
        loss.tokens.lower = own_bounds_.data();
        loss.tokens.upper = loss.tokens.lower + count_;
    }
    loss.options = options_;
    loss.uniform_weight = case_.uniform_weight;
    loss.unclipped_only = case_.unclipped_only;
    loss.start = kGrids.start();
    loss.last = kGrids.last();
    loss.target = target_;
    loss.bounds = case_.own_bounds ? nullptr : bounds.data();
    loss.report = reinterpret_cast<Report*>(report.data());
    loss.dlog_probs = dlog_probs.data();
    loss.dlog_ratios = case_.log_ratios ? dlog_ratios.data() : nullptr;
    loss.dentropy = dentropy.data();
    loss.ticket = ticket.data();
    loss.outputs = outputs.data();

    auto* const partials = reinterpret_cast<Moments*>(search_partials.data());
    const SearchResult result{bounds.data(), masses.data()};
    finish(cuda::contributions(search, partials, nullptr));
    finish(cuda::solve({table.data(), 1, kGrids, target_, result}, nullptr));
    const auto of_table = std::pair(bounds.values(), masses.values());
    finish(cuda::search(search, target_, result, partials, nullptr));
    if (std::pair(bounds.values(), masses.values()) != of_table) {
        verdict_.fail(0, "search is not contributions and solve");
    }
    finish(cuda::token_loss(loss, loss_partials.data(), nullptr));
    if (ticket.values()[0] != 0) verdict_.fail(0, "the ticket of the loss is not 0");
    verdict_.guards();
    return {table.values(),    masses.values(), dlog_probs.values(), dlog_ratios.values(),
            dentropy.values(), bounds.values(), report.values(),     outputs.values()};
}

void Tokens::check_loss(const Outputs& got) {
    Sum loss, pg_loss, kl_loss, log_ratio, entropy, lower, upper;
    std::vector<Sum> masses(kMasses);
    double count = 0.0, clipped = 0.0, dual_clipped = 0.0;
    for (int64_t i = 0; i < count_; ++i) {
        double of_policy = 0.0, of_kl = 0.0, dentropy = 0.0;
        if (counted_[i]) {
            const Token of = token(i);
            const Ratio ratio = this->ratio(i);
            const Bounds bounds = this->bounds(i);
            const PolicyTerm term = policy_term(of, ratio, bounds, options_);
            const double kl = kl_term(of.log_prob, of.ref_log_prob, options_.kl_loss_type).value;
            pg_loss.add(weights_[i] * term.loss);
            kl_loss.add(weights_[i] * kl);
            loss.add(weights_[i] * (term.loss + options_.kl_loss_coef * kl));
            loss.add(-weights_[i] * options_.entropy_coef * entropy_[i]);
            log_ratio.add(ratio.log_value);
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
            of_policy = weights_[i] * term.grad;
            of_kl = weights_[i] * kl_grad(of, options_);
            dentropy = -weights_[i] * options_.entropy_coef;
        }
        const double dlog_prob = case_.log_ratios ? of_kl : of_policy + of_kl;
        const double dlog_ratio = case_.log_ratios ? of_policy : NAN;
        const auto compare = [&](const char* what, double value, double expected, double error) {
            verdict_.compare(what, i, value, expected, error);
        };
        compare("log_prob of token", got.outputs[i], counted_[i] ? (float)log_probs_[i] : 0.0f,
                0.0);
        compare("entropy of token", got.outputs[count_ + i],
                counted_[i] ? (float)entropy_[i] : 0.0f, 0.0);
        compare("dlog_prob of token", got.dlog_probs[i], dlog_prob,
                kDouble * std::fabs(dlog_prob) + 0x1p-60);
        compare("dlog_ratio of token", got.dlog_ratios[i], dlog_ratio,
                kDouble * std::fabs(of_policy));
        compare("dentropy of token", got.dentropy[i], dentropy, kDouble * std::fabs(dentropy));
    }
    // Those of the table are at bounds that are not rounded to float32.
    if (case_.all_inputs) masses = this->masses();
    const double pos = masses[0].value, neg = masses[1].value, neg_start = masses[3].value;
    const double neg_last = case_.unclipped_only ? masses[5].value : neg_start;
    const double tokens = std::max(count, 1.0);
    const auto share = [](double p, double n) { return p + n == 0.0 ? 0.0 : p / (p + n); };
    const Sum expected[kReportSize] = {
        loss,
        pg_loss,
        {clipped / tokens, 1.0},
        {dual_clipped / tokens, 1.0},
        {-log_ratio.value / tokens, log_ratio.size / tokens},
        {entropy.value / tokens, entropy.size / tokens},
        kl_loss,
        {lower.value / tokens, lower.size / tokens},
        {upper.value / tokens, upper.size / tokens},
        {share(pos, neg), 1.0},
        {share(masses[2].value, neg_start), 1.0},
        {share(masses[4].value, neg_last), 1.0},
        {tested_quantity(pos, neg, true), 1.0},
        {(double)(tested_quantity(pos, neg, case_.target_is_ratio) < target_.value), 0.0},
        {count, 0.0},
    };
    for (int k = 0; k < kReportSize; ++k) {
        const auto [value, size] = expected[k];
        verdict_.compare("report entry", k, got.report[k], value,
                         0x1p-24 * std::fabs(value) + kDouble * size);
    }
}

void Tokens::run() {
    const Outputs got = launch();
    const auto compare = [&](const char* what, const std::vector<double>& of,
                             const std::vector<Sum>& expected) {
        for (size_t i = 0; i < expected.size(); ++i) {
            const auto [value, size] = expected[i];
            verdict_.compare(what, (int64_t)i, of[i], value, kDouble * size);
        }
    };
    compare("table entry", got.table, table_);
    verdict_.compare("bound", 0, got.bounds[0], (float)lower_[at_lower_], 0.0);
    verdict_.compare("bound", 1, got.bounds[1], (float)upper_[at_upper_], 0.0);
    compare("share", got.masses, masses());
    check_loss(got);

    const Outputs again = launch();
    const bool same = same_bits(got.table.data(), again.table.data(), (int64_t)got.table.size()) &&
                      same_bits(got.report.data(), again.report.data(), kReportSize) &&
                      same_bits(got.dlog_probs.data(), again.dlog_probs.data(), count_) &&
                      same_bits(got.dlog_ratios.data(), again.dlog_ratios.data(), count_);
    if (!same) verdict_.fail(0, "other bits in a second run");
}

}  // namespace

void run(const TokenCase& of, Verdict& verdict) { Tokens(of, verdict).run(); }

}  // namespace driver
