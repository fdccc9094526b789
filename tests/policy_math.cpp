// policy_math.h for test_policy_math.py: many tokens in one call of ctypes.
#include "policy_math.h"

using namespace bapo;

extern "C" {

struct Inputs {
    Token token;
    Bounds bounds;
};
struct Results {
    double ratio, log_ratio, loss, grad, clipped, dual_clipped, kl, dkl, clipped_mass, kept_mass;
};

void terms(int64_t count, const Inputs* inputs, const double* numbers, Results* results) {
    static_assert(sizeof(PolicyOptions) == 7 * sizeof(double), "test_policy_math.py has seven");
    const PolicyOptions options{(int64_t)numbers[0], numbers[1],          numbers[2], numbers[3],
                                numbers[4],          (int64_t)numbers[5], numbers[6]};
    for (int64_t i = 0; i < count; ++i) {
        const auto& [token, bounds] = inputs[i];
        const Ratio ratio = policy_ratio(token.log_prob, token.old_log_prob);
        const PolicyTerm term = policy_term(token, ratio, bounds, options);
        const KlTerm kl = kl_term(token.log_prob, token.ref_log_prob, options.kl_loss_type);
        results[i] = {
            ratio.value,
            ratio.log_value,
            term.loss,
            term.grad,
            (double)term.clipped,
            (double)term.dual_clipped,
            kl.value,
            kl_grad(token, options),
            contribution(ratio.value, token.advantage, bounds, false),
            contribution(ratio.value, token.advantage, bounds, true),
        };
    }
}

// The masses at the points of one side's grid, from the tokens of that side; returns their number.
int masses(int64_t count, const double* ratios, const double* weights, double start, double maximum,
           double step, bool negative, bool unclipped_only, double* table) {
    const Grid grid = Grid::of(start, maximum, step);
    double points[kMaxGridPoints], sum = start;
    for (int k = 0; k < grid.count; ++k, sum += step) points[k] = grid.point(k, sum);
    Moments bins[kMaxGridPoints + 1] = {};
    for (int64_t i = 0; i < count; ++i) {
        bins[count_points(points, grid, ratios[i], negative)] +=
            {weights[i] * ratios[i], weights[i]};
    }
    const auto mass = negative ? negative_mass : positive_mass;
    for (int k = 0; k < grid.count; ++k) {
        table[k] = mass(bins, points, grid.count, k, unclipped_only);
    }
    return grid.count;
}

double quantity(double positive, double negative, bool is_ratio) {
    return tested_quantity(positive, negative, is_ratio);
}
}
