#include "token_case.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/launch_cuda.h"
#include "tokens.h"

namespace driver {

using namespace bapo;

std::string TokenCase::name() const {
    std::string text = "tokens=" + std::to_string(count);
    text += upper_first ? " upper first" : " lower first";
    for (const auto& [on, word] : {std::pair{uniform_weight, " uniform weight"},
                                   {unclipped_only, " unclipped only"},
                                   {target_is_ratio, " ratio"},
                                   {all_inputs, " all inputs"},
                                   {surrogate == kCispo, " cispo"},
                                   {surrogate == kSapo, " sapo"},
                                   {surrogate == kMask, " mask"},
                                   {own_bounds, " own bounds"},
                                   {log_ratios, " log-ratios"}}) {
        if (on) text += word;
    }
    return text;
}

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

class Tokens {
  public:
    Tokens(const TokenCase& of, Verdict& verdict);
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
        if (case_.own_bounds) return {own_bounds_[i], own_bounds_[case_.count + i]};
        return {(float)lower_[at_lower_], (float)upper_[at_upper_]};
    }
    double search_weight(int64_t i) const {
        return case_.uniform_weight ? 1.0
                                    : std::exp(case_.all_inputs ? rollout_[i] : log_probs_[i]);
    }
    double quantity(size_t lower, size_t upper) const {
        return tested_quantity(table_[lower_.size() + upper].value, table_[lower].value,
                               case_.target_is_ratio);
    }
    void search();
    Outputs launch() const;
    void check_loss(const Outputs& got);

    const TokenCase case_;
    Verdict& verdict_;
    const std::vector<double> lower_ = grid_points(kGrids.lower),
                              upper_ = grid_points(kGrids.upper);
    PolicyOptions options_{kClip, 3.0, 0.7, 1.5, 0.1, kK1, 0.01};
    Target target_;
    std::vector<uint8_t> counted_;
    std::vector<double> log_probs_, entropy_, weights_, log_ratios_;
    std::vector<float> old_, ref_, rollout_, advantages_, rollout_is_weights_, own_bounds_;

    std::vector<Sum> table_;
    size_t at_lower_ = 0, at_upper_ = 0;
};

Tokens::Tokens(const TokenCase& of, Verdict& verdict)
    : case_(of), verdict_(verdict), target_{0.0, of.target_is_ratio, of.upper_first} {
    options_.surrogate = of.surrogate;
    options_.kl_loss_type = of.count % 3;
    own_bounds_.resize(2 * of.count);
    for (int64_t i = 0; i < of.count; ++i) {
        const auto draw = [&](int64_t which, double low, double high) {
            return uniform(7, 16 * i + which, low, high);
        };
        const bool counted = i % 5 != 3;
        const double poison = counted ? 0.0 : NAN;
        const double log_prob = draw(0, -6.0, -0.1);
        counted_.push_back(counted);
        log_probs_.push_back(log_prob + poison);
        entropy_.push_back(draw(1, 0.0, 9.0) + poison);
        weights_.push_back(draw(2, 0.5, 1.5) / (double)of.count + poison);
        old_.push_back((float)(log_prob - draw(3, -1.5, 1.5) + poison));
        ref_.push_back((float)(log_prob + draw(4, -1.0, 1.0) + poison));
        rollout_.push_back((float)(log_prob + draw(5, -0.5, 0.5) + poison));
        advantages_.push_back(i % 7 == 5 ? 0.0f : (float)(draw(6, -1.0, 1.0) + poison));
        rollout_is_weights_.push_back((float)(draw(7, 0.5, 2.0) + poison));
        log_ratios_.push_back(draw(8, -1.5, 1.5) + poison);
        own_bounds_[i] = (float)(draw(9, 0.6, 1.0) + poison);
        own_bounds_[of.count + i] = (float)(draw(10, 1.0, 2.0) + poison);
    }
    search();
}

// The table, a target that is reached midway, and where Algorithm 1 stops.
void Tokens::search() {
    table_.resize(lower_.size() + upper_.size());
    parallel((int64_t)table_.size(), [&](int64_t point) {
        const bool is_upper = point >= (int64_t)lower_.size();
        const double bound = is_upper ? upper_[point - lower_.size()] : lower_[point];
        for (int64_t i = 0; i < case_.count; ++i) {
            const double A = advantages_[i];
            if (!counted_[i] || A == 0.0 || (A > 0.0) != is_upper) continue;
            table_[point].add(search_weight(i) * contribution(ratio(i).value, A, {bound, bound},
                                                              case_.unclipped_only));
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
    const int points = (int)table_.size();
    const Array<uint8_t> counted("counted", counted_);
    const Array<double> log_probs("log_probs", log_probs_), entropy("entropy", entropy_),
        weights("weights", weights_), log_ratios("log_ratios", log_ratios_);
    const Array<float> old("old_log_probs", old_), ref("ref_log_probs", ref_),
        rollout("rollout_log_probs", rollout_), advantages("advantages", advantages_),
        rollout_is_weights("rollout_is_weights", rollout_is_weights_),
        own_bounds("own bounds", own_bounds_);
    const Array<double> table("table", std::vector(points, 0.0)), masses("masses", kMasses),
        loss_partials("partials of the loss", cuda::token_loss_partials(case_.count)),
        dlog_probs("dlog_probs", case_.count), dlog_ratios("dlog_ratios", case_.count),
        dentropy("dentropy", case_.count);
    const Array<float> bounds("bounds", 2), report("report", kReportSize),
        outputs("outputs", 2 * case_.count);
    const Array<int32_t> ticket("ticket", std::vector<int32_t>{0});

    ContributionParams search{};
    search.count = case_.count;
    search.log_probs = log_probs.data();
    search.tokens.counted = (const bool*)counted.data();
    search.tokens.advantages = advantages.data();
    search.grids = kGrids;
    search.uniform_weight = case_.uniform_weight;
    search.unclipped_only = case_.unclipped_only;
    search.table = table.data();
    search.ranks = 1;
    const Array<double> search_partials(
        "partials of the search",
        cuda::search_partials(search) * (int64_t)(sizeof(Moments) / sizeof(double)));
    TokenLossParams loss{};
    loss.tokens.weights = weights.data();
    if (case_.all_inputs) {
        search.tokens.old_log_probs = old.data();
        search.tokens.rollout_log_probs = rollout.data();
        loss.tokens.rollout_is_weights = rollout_is_weights.data();
        loss.tokens.ref_log_probs = ref.data();
        loss.masses = masses.data();
    }
    if (case_.log_ratios) {
        search.tokens.log_ratios = loss.tokens.log_ratios = log_ratios.data();
        loss.dlog_ratios = dlog_ratios.data();
    }
    if (case_.own_bounds) {
        loss.tokens.lower = own_bounds.data();
        loss.tokens.upper = loss.tokens.lower + case_.count;
    }
    loss.count = case_.count;
    loss.log_probs = search.log_probs;
    loss.entropy = entropy.data();
    loss.tokens.counted = search.tokens.counted;
    loss.tokens.old_log_probs = search.tokens.old_log_probs;
    loss.tokens.advantages = search.tokens.advantages;
    loss.tokens.rollout_log_probs = search.tokens.rollout_log_probs;
    loss.options = options_;
    loss.uniform_weight = case_.uniform_weight;
    loss.unclipped_only = case_.unclipped_only;
    loss.start = kGrids.start();
    loss.last = kGrids.last();
    loss.target = target_;
    loss.bounds = case_.own_bounds ? nullptr : bounds.data();
    loss.report = reinterpret_cast<Report*>(report.data());
    loss.dlog_probs = dlog_probs.data();
    loss.dentropy = dentropy.data();
    loss.ticket = ticket.data();
    loss.outputs = outputs.data();

    auto* const partials = reinterpret_cast<Moments*>(search_partials.data());
    const SearchResult result{bounds.data(), masses.data()};
    finish(cuda::contributions(search, partials, nullptr));
    finish(cuda::solve({table.data(), 1, kGrids, target_, result}, nullptr));
    const auto bounds_of_table = bounds.values();
    const auto masses_of_table = masses.values();
    finish(cuda::search(search, target_, result, partials, nullptr));
    if (bounds.values() != bounds_of_table || masses.values() != masses_of_table) {
        verdict_.fail(0, "search is not contributions and solve");
    }
    finish(cuda::token_loss(loss, loss_partials.data(), nullptr));
    if (ticket.values()[0] != 0) verdict_.fail(0, "the ticket of the loss is not 0");
    const Outputs got{table.values(),    masses.values(), dlog_probs.values(), dlog_ratios.values(),
                      dentropy.values(), bounds.values(), report.values(),     outputs.values()};
    verdict_.guards();
    return got;
}

void Tokens::check_loss(const Outputs& got) {
    const Bounds start = kGrids.start(), last = kGrids.last();
    Sum loss, pg_loss, kl_loss, log_ratio, entropy, lower, upper;
    Sum pos, neg, pos_start, neg_start, pos_last, neg_last;
    double count = 0.0, clipped = 0.0, dual_clipped = 0.0;
    for (int64_t i = 0; i < case_.count; ++i) {
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
            const double A = of.advantage, w = search_weight(i);
            if (A != 0.0) {
                (A > 0.0 ? pos : neg)
                    .add(w * contribution(ratio.value, A, bounds, case_.unclipped_only));
                (A > 0.0 ? pos_start : neg_start)
                    .add(w * contribution(ratio.value, A, start, case_.unclipped_only));
                (A > 0.0 ? pos_last : neg_last)
                    .add(w * contribution(ratio.value, A, last, case_.unclipped_only));
            }
            of_policy = weights_[i] * term.grad;
            of_kl = weights_[i] * kl_grad(of, options_);
            dentropy = -weights_[i] * options_.entropy_coef;
        }
        verdict_.compare("log_prob of token", i, got.outputs[i],
                         counted_[i] ? (float)log_probs_[i] : 0.0f, 0.0);
        verdict_.compare("entropy of token", i, got.outputs[case_.count + i],
                         counted_[i] ? (float)entropy_[i] : 0.0f, 0.0);
        const double dlog_prob = case_.log_ratios ? of_kl : of_policy + of_kl;
        verdict_.compare("dlog_prob of token", i, got.dlog_probs[i], dlog_prob,
                         kDouble * std::fabs(dlog_prob) + 0x1p-60);
        verdict_.compare("dlog_ratio of token", i, got.dlog_ratios[i],
                         case_.log_ratios ? of_policy : NAN, kDouble * std::fabs(of_policy));
        verdict_.compare("dentropy of token", i, got.dentropy[i], dentropy,
                         kDouble * std::fabs(dentropy));
    }
    if (case_.all_inputs) {  // the masses of the table, at bounds that are not rounded to float32
        pos = table_[lower_.size() + at_upper_];
        neg = table_[at_lower_];
        pos_start = table_[lower_.size()];
        neg_start = table_[0];
        pos_last = table_.back();
        neg_last = table_[lower_.size() - 1];
    }
    const double tokens = std::max(count, 1.0);
    const auto share = [](double p, double n) { return p + n == 0.0 ? 0.0 : p / (p + n); };
    const double reached = tested_quantity(pos.value, neg.value, case_.target_is_ratio);
    const struct {
        double value, size;
    } expected[kReportSize] = {
        {loss.value, loss.size},
        {pg_loss.value, pg_loss.size},
        {clipped / tokens, 1.0},
        {dual_clipped / tokens, 1.0},
        {-log_ratio.value / tokens, log_ratio.size / tokens},
        {entropy.value / tokens, entropy.size / tokens},
        {kl_loss.value, kl_loss.size},
        {lower.value / tokens, lower.size / tokens},
        {upper.value / tokens, upper.size / tokens},
        {share(pos.value, neg.value), 1.0},
        {share(pos_start.value, neg_start.value), 1.0},
        {share(pos_last.value, (case_.unclipped_only ? neg_last : neg_start).value), 1.0},
        {tested_quantity(pos.value, neg.value, true), 1.0},
        {reached < target_.value ? 1.0 : 0.0, 0.0},
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
    for (size_t i = 0; i < table_.size(); ++i) {
        verdict_.compare("table entry", (int64_t)i, got.table[i], table_[i].value,
                         kDouble * table_[i].size);
    }
    verdict_.compare("bound", 0, got.bounds[0], (float)lower_[at_lower_], 0.0);
    verdict_.compare("bound", 1, got.bounds[1], (float)upper_[at_upper_], 0.0);
    const Sum masses[] = {table_[lower_.size() + at_upper_],
                          table_[at_lower_],
                          table_[lower_.size()],
                          table_[0],
                          table_.back(),
                          table_[lower_.size() - 1]};
    for (int k = 0; k < kMasses; ++k) {
        verdict_.compare("share", k, got.masses[k], masses[k].value, kDouble * masses[k].size);
    }
    check_loss(got);

    const Outputs again = launch();
    const bool same = same_bits(got.table.data(), again.table.data(), (int64_t)got.table.size()) &&
                      same_bits(got.report.data(), again.report.data(), kReportSize) &&
                      same_bits(got.dlog_probs.data(), again.dlog_probs.data(), case_.count) &&
                      same_bits(got.dlog_ratios.data(), again.dlog_ratios.data(), case_.count);
    if (!same) verdict_.fail(0, "other bits in a second run");
}

}  // namespace

void run(const TokenCase& token_case, Verdict& verdict) { Tokens(token_case, verdict).run(); }

}  // namespace driver
