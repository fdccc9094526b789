// The samples of rows that stand for their gradients; on row_pass.h and ../sample.h. Compiled once
// per instruction set (BAPO_ISA), with internal linkage, as in simd.h. 2^t must have the bits of
// row_gradient, which compares it with the threshold again.

#include "row_pass.h"
#include "sample.h"

namespace {

// The labels of a row, ascending, as marks of one vector after the other: -1 at a label, or 0.
struct LabelMarks {
    const int64_t *next, *end;

    bool before(int64_t column) const { return next < end && *next < column; }
    VInt at(int64_t begin) {
        VInt marks = {};
        for (; before(begin + kLanes); ++next) {
            if (*next >= begin) marks[*next - begin] = -1;
        }
        return marks;
    }
};

template <typename T, bool kSoftcap>
class SampledRow {
  public:
    SampledRow(const SampleParams& params, int64_t index)
        : params_(params),
          index_(index),
          row_(params.rows.logits_at<T>(index)),
          transform_(params.rows.transform.at_row(index)),
          origin_((float)params.stats[2 * index]),
          first_(params.columns.shard ? (int32_t)params.columns.shard[0] : 0) {}

    void draw() {
        const float threshold = threshold_of(params_, index_, [&] { return mass_beside_labels(); });
        if (threshold == 0.0f) {
            keep_labels();
            params_.drawn[index_] = {};
        } else {
            params_.drawn[index_] = drawn(threshold);
        }
        // Improbable beyond all measure: the row becomes NaN.
        if (count_ > params_.places) {
            count_ = params_.places;
            params_.values[index_ * params_.places] = (float)NAN;
        }
        params_.counts[index_] = (int32_t)count_;
    }

  private:
    // Calls f(z, t, marks, index) for every vector, and each() after every group of them.
    template <typename F, typename Each>
    void for_each(F f, Each each) const {
        const int64_t vocab = params_.rows.vocab, K = params_.labels_per_row;
        const int64_t* const labels = params_.labels + index_ * K;
        LabelMarks marks{labels, labels + K};
        const float scale = base2_scale(transform_);
        for (int64_t begin = 0; begin < vocab; begin += kGroup) {
            const int64_t end = begin + kGroup < vocab ? begin + kGroup : vocab;
            const auto over_group = [&](auto marks_at) {
                for_each_vector(row_, begin, end, [&](VFloat z, int64_t i) {
                    prefetch(row_ + i);
                    const VFloat t = (transformed<kSoftcap>(z, transform_) - origin_) * scale;
                    f(z, t, marks_at(i), i);
                });
            };
            if (marks.before(end)) {
                over_group([&](int64_t i) { return marks.at(i); });
            } else {
                over_group([](int64_t) { return VInt{}; });
            }
            each();
        }
    }

    double mass_beside_labels() const {
        CompensatedSum sums;
        VFloat group = {};
        for_each(
            [&](VFloat, VFloat t, VInt label, int64_t) { group += label ? VFloat{} : vexp2<>(t); },
            [&] {
                sums.add(group);
                group = VFloat{};
            });
        return sums.total();
    }

    void keep_labels() {
        for_each([&](VFloat z, VFloat, VInt label, int64_t i) { keep(label, z, i); }, [] {});
    }

    Drawn drawn(float threshold) {
        const Borders borders = Borders::of(threshold);
        VUint sums;  // of the first ids
        for (int lane = 0; lane < kLanes; ++lane) {
            sums[lane] = kIdFactor * (uint32_t)(first_ + lane) + (uint32_t)params_.seeds[index_];
        }
        CompensatedSum masses, weighted_masses;
        VFloat mass = {}, weighted_mass = {};
        int64_t count = 0;
        double sum_t = 0.0;
        for_each(
            [&](VFloat z, VFloat t, VInt label, int64_t i) {
                const VFloat e = label ? VFloat{} : vexp2<>(t);
                const VInt hash = (VInt)hash_of(sums + kIdFactor * (uint32_t)i);
                const VFloat border =
                    __builtin_convertvector(hash, VFloat) * borders.step + borders.half;
                const VInt is_drawn = e >= border, is_small = e < threshold;
                const VFloat small = is_small ? e : VFloat{};
                mass += small;
                weighted_mass += factor_of(t) * small;
                const VInt kept = is_drawn | label;
                if (!any(kept)) return;
                keep(kept, z, i);
                for (int lane = 0; lane < kLanes; ++lane) {
                    if (!(is_drawn & is_small)[lane]) continue;
                    ++count;
                    sum_t += t[lane];
                }
            },
            [&] {
                masses.add(mass);
                weighted_masses.add(weighted_mass);
                mass = weighted_mass = VFloat{};
            });
        return drawn_of(threshold, count, sum_t, masses.total(), weighted_masses.total());
    }

    void keep(VInt kept, VFloat z, int64_t begin) {
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!kept[lane]) continue;
            if (count_ < params_.places) {
                const int64_t at = index_ * params_.places + count_;
                params_.ids[at] = (int32_t)(first_ + begin + lane);
                params_.values[at] = z[lane];
            }
            ++count_;
        }
    }

    const SampleParams& params_;
    int64_t index_;
    const T* row_;
    Transform transform_;
    float origin_;
    int32_t first_;
    int64_t count_ = 0;
};

}  // namespace

namespace bapo::cpu {
void BAPO_CONCAT(sample_rows_, BAPO_ISA)(const SampleParams&, RowQueue&);
void BAPO_CONCAT(sample_rows_, BAPO_ISA)(const SampleParams& params, RowQueue& queue) {
    with_dtype(params.rows.dtype, [&]<typename T>(T) {
        with_softcap(params.rows.transform, [&]<bool kSoftcap>() {
            take_rows(params, queue, [](const SampleParams& params, int64_t index) {
                SampledRow<T, kSoftcap>(params, index).draw();
            });
        });
    });
}
}  // namespace bapo::cpu
