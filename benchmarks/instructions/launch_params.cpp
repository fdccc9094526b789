// A launch of the row pass, for launch.py: how its rows are distributed, and the parameters as they
// lie in constant memory, in which every pointer is the number of a region, above 2^32.
// Usage: launch_params dtype vocabulary rows gradient major bytes_per_multiprocessor threads
#include <cstdio>
#include <cstdlib>

#include "cuda/cluster_plan.h"
#include "runtime.h"

using namespace bapo;

struct Scales {
    float inner, scale2;
};
struct Arguments {
    RowPassParams params;
    Scales scales;
    int last;  // stages, or threads of the generic kernel
};
// The head of the shared memory in row_pass_cluster.cu, rounded up to stages.
constexpr int kHeadBytes = 3712;

template <typename T>
static void point(T*& pointer, uintptr_t region) {
    pointer = reinterpret_cast<T*>(region << 32);
}

int main(int, char** argv) {
    static Arguments all{};
    RowPassParams& params = all.params;
    params.rows.dtype = static_cast<DType>(atoi(argv[1]));
    params.rows.batches = 1;
    params.rows.vocab = params.rows.row_stride = params.rows.grad_row_stride = atoll(argv[2]);
    params.rows.rows = atoll(argv[3]);
    point(params.rows.logits, 1);
    if (atoi(argv[4])) {
        point(params.rows.grad, 2);
        point(params.tokens.weights, 3);
        point(params.tokens.advantages, 4);
        point(params.undecided, 5);
    }
    point(params.tokens.counted, 6);
    point(params.labels, 7);
    point(params.log_probs, 8);
    point(params.entropy, 9);
    point(params.stats, 10);
    Options options{};
    options.temperature = options.logit_scale = 1.0;
    options.softcap = options.clip_ratio_c = INFINITY;
    params.rows.transform = options.transform(nullptr);
    params.options = options.policy();
    params.start = {0.6, 1.2};
    params.maximum = {0.9, 3.0};
    all.scales = {1.0f, 1.44269504f};

    emulated::current = 0;
    emulated::device.major = atoi(argv[5]);
    emulated::device.bytes_per_multiprocessor = atoi(argv[6]);
    emulated::device.bytes_per_block = atoi(argv[6]) - 1024;
    const cuda::ClusterPlan plan = cuda::plan_on_this_device(params.rows, kHeadBytes);
    const int threads = atoi(argv[7]);
    all.last = plan.cluster ? plan.stages : threads;
    const int header[] = {plan.cluster, plan.cluster ? cuda::kComputeWarps : threads / 32};
    fwrite(header, 1, sizeof header, stdout);
    fwrite(&all, 1, sizeof all, stdout);
}
