// The inputs of a case of the row kernels, on the host.
#pragma once

#include <vector>

#include "reference.h"
#include "row_case.h"

namespace driver {

// Where rows lie in a buffer: elements from its start, which is a multiple of 256 bytes.
struct Layout {
    int64_t offset, rows, row_stride, batch_stride;

    Layout(const RowCase& of, int64_t shift) {
        const bool anywhere = of.start == Start::kUnaligned;
        const int64_t unit = anywhere ? 1 : 16 / size_of(of.dtype);
        offset = unit * shift;
        rows = of.rows;
        row_stride = of.vocab + unit * (anywhere ? 2 : 1);
        row_stride = (row_stride + unit - 1) / unit * unit;
        batch_stride = rows * row_stride + 3 * unit;
    }
    int64_t start(int64_t row) const {
        return offset + row / rows * batch_stride + row % rows * row_stride;
    }
    int64_t size(int64_t batches) const { return offset + batches * batch_stride; }
};

// The rows in turn: ratio and advantage, which determine the gradient of a row.
struct Kind {
    double ratio, advantage;
    bool counted = true;
};
constexpr Kind kKinds[] = {
    {1.0, 1.5},         // kept
    {1.0, 1.0, false},  // skipped
    {2.0, 0.7},         // undecided
    {1.1, 0.0},         // idle
    {5.0, 1.0},         // clipped, whatever the bounds
    {1.05, -0.8},       // kept
    {0.75, -1.2},       // undecided
    {12.0, -0.5},       // beyond the dual clip
    {0.3, -1.0},        // clipped
};
constexpr bapo::Bounds kStart{0.6f, 1.2f}, kMaximum{0.9f, 3.0f};
constexpr float kKnown[2] = {0.7f, 2.5f};
constexpr double kDualClip = 10.0;

struct RowInputs {
    int64_t count;
    bapo::Transform transform;
    std::vector<float> temperatures;
    bapo::PolicyOptions options;
    std::vector<int64_t> labels;
    std::vector<uint8_t> counted;
    std::vector<float> old_log_probs, advantages, rollout_is_weights, ref_log_probs;
    std::vector<double> weights;

    bapo::Token token(int64_t i, double log_prob) const {
        return {log_prob, old_log_probs[i], ref_log_probs[i], advantages[i], rollout_is_weights[i]};
    }
    double dlog_prob(int64_t i, double log_prob, bapo::Bounds bounds) const {
        const bapo::Token of = token(i, log_prob);
        const bapo::Ratio ratio = bapo::policy_ratio(log_prob, of.old_log_prob);
        const double of_policy = bapo::policy_term(of, ratio, bounds, options).grad;
        return weights[i] * (of_policy + bapo::kl_grad(of, options));
    }
    // The gradient at these bounds, and how far an error of the log-prob moves it.
    Wanted wanted(int64_t i, Value log_prob, bapo::Bounds bounds) const {
        if (!counted[i]) return {};
        const auto [value, error] = log_prob;
        const double g = dlog_prob(i, value, bounds);
        const double up = dlog_prob(i, value + error, bounds) - g;
        const double down = dlog_prob(i, value - error, bounds) - g;
        return {{g, std::fmax(std::fabs(up), std::fabs(down))}, weights[i] * options.entropy_coef};
    }
    bool undecided(int64_t i, double log_prob, bool known_bounds) const {
        if (!counted[i] || known_bounds) return false;
        const double first = dlog_prob(i, log_prob, kStart);
        return first == first && first != dlog_prob(i, log_prob, kMaximum);
    }
};

template <typename T>
void fill_row(T* row, int64_t i, int64_t vocab, int64_t label) {
    const auto sequence = (uint64_t)i + 1;
    for (int64_t j = 0; j < vocab; ++j) {
        const uint64_t bits = random_bits(sequence, j);
        int sum = 0;  // of four, near enough to normal
        for (int part = 0; part < 64; part += 16) sum += (int)(bits >> part & 0xffff) - 0x8000;
        row[j] = T((float)sum * 8e-5f);
    }
    if (i % 4 == 1) row[label] = T(24.0f);  // a probability near 1
}

// A bad value in a row or its label, different for each kind.
template <typename T>
void spoil_row(T* row, int64_t i, int64_t vocab, int64_t* label) {
    const T minus_inf(-INFINITY), nan(NAN);
    switch (i % std::size(kKinds)) {
        case 0: row[vocab / 2] = nan; break;
        case 1: std::fill(row, row + vocab, nan); break;
        case 2: *label = vocab; break;
        case 3: row[vocab - 1] = nan; break;
        case 4: std::fill(row + vocab / 3, row + vocab, minus_inf); break;
        case 5: row[*label] = minus_inf; break;
        case 6: *label = -7; break;
        case 7:
            for (int64_t j = 0; j < vocab; ++j) row[j] = j % 3 && j != *label ? minus_inf : row[j];
            break;
    }
}

// All inputs, and the softmax of every row. The memory between the rows is NaN.
template <typename T>
struct HostRows {
    Layout layout;
    RowInputs in{};
    std::vector<T> image;  // of the logits
    std::vector<Softmax> softmax;

    explicit HostRows(const RowCase& of) : layout(of, 1), image(layout.size(of.batches)) {
        constexpr double kTemperature = 0.8, kLogitScale = 1.1, kSoftcap = 30.0;
        const double by = of.temperatures ? 1.0 : kTemperature, slope = kLogitScale / by;
        in.count = of.batches * of.rows;
        for (int64_t i = 0; of.temperatures && i < in.count; ++i) {
            const double poison = kKinds[i % std::size(kKinds)].counted ? 0.0 : NAN;
            in.temperatures.push_back((float)(uniform(0, 4 * i, 0.5, 2.0) + poison));
        }
        const double scale = of.softcap ? kSoftcap / by : slope;
        const float* const temperatures = of.temperatures ? in.temperatures.data() : nullptr;
        in.transform = {of.softcap, kLogitScale, kSoftcap, scale, slope, temperatures};
        in.options.clip_ratio_c = kDualClip;
        in.options.kl_loss_coef = of.kl ? 0.1 : 0.0;
        in.options.kl_loss_type = bapo::kK3;
        in.options.entropy_coef = of.entropy ? 0.01 : 0.0;
        in.labels.resize(in.count);
        softmax.resize(in.count);
        std::memset((void*)image.data(), 0xff, image.size() * sizeof(T));
        parallel(in.count, [&](int64_t i) {
            T* const row = image.data() + layout.start(i);
            int64_t& label = in.labels[i];
            label = (int64_t)(random_bits(0, i) % (uint64_t)of.vocab);
            fill_row(row, i, of.vocab, label);
            if (of.bad_values) spoil_row(row, i, of.vocab, &label);
            softmax[i] = driver::softmax(row, of.vocab, label, in.transform.of_row(i));
        });
        for (int64_t i = 0; i < in.count; ++i) add_token(i);
    }

  private:
    void add_token(int64_t i) {
        const Kind& kind = kKinds[i % std::size(kKinds)];
        const double log_prob = softmax[i].log_prob.value;
        const double near = std::isfinite(log_prob) ? log_prob : -1.0;
        const double poison = kind.counted ? 0.0 : NAN;  // the inputs of skipped tokens
        const auto draw = [&](int64_t which, double low, double high) {
            return uniform(0, 4 * i + which, low, high) + poison;
        };
        in.counted.push_back(kind.counted);
        in.old_log_probs.push_back((float)(near - std::log(kind.ratio) + poison));
        in.advantages.push_back((float)(kind.advantage + poison));
        in.rollout_is_weights.push_back((float)draw(1, 0.5, 2.0));
        in.ref_log_probs.push_back((float)(near + draw(2, -1.0, 1.0)));
        in.weights.push_back(draw(3, 8.0, 24.0));
    }
};

}  // namespace driver
