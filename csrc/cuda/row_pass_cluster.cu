// The row pass for sm_90 and later: a row lies in the shared memory of a cluster of blocks, so that
// both passes read it on chip and it crosses the memory bus once.
//
// One warp of a block loads, eight compute. Rows are cut into chunks of 4 KB, which the blocks of
// the cluster take in turn. A chunk stays in its stage of shared memory until the second pass has
// read it; the stage is then filled with a chunk of a later row, so that loads are in flight while
// gradients are written. The warps send their sums to every block, and every block takes the same
// decision.

#include "cluster_plan.h"
#include "cuda/ptx.cuh"
#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kThreads = kComputeThreads + kWarp;
constexpr int kComputeBarrier = 1;  // 0 is __syncthreads
// Blocks per multiprocessor, by which its registers are divided. sm_120 has 100 KB of shared memory
// and little double precision: one block there, or the registers would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;
#endif

// The head of the dynamic shared memory; the ring of stages follows.
struct alignas(128) Shared {
    uint64_t full[kMaxStages];
    uint64_t empty[kMaxStages];
    uint64_t sums_arrived[2];
    RowSums sums[2][kMaxCluster * kComputeWarps];
    SecondPass pass;
    float z_label;
};
static_assert(sizeof(RowSums) == 24 && kComputeThreads == kComputeWarps * kWarp);

// The position of a chunk in the ring of stages.
struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Which of the rows first, first + step, ... are counted, 32 at a time: bit k is row first +
// k*step.
__device__ uint32_t counted_rows(const bool* counted, int64_t first, int64_t step, int64_t count) {
    const int64_t row = first + (threadIdx.x % kWarp) * step;
    return __ballot_sync(kAllLanes, row < count && counted[row]);
}

template <typename T, bool kSoftcap, bool kAligned>
struct Block {
    static constexpr int n = kVec<T>;
    static constexpr int64_t kChunk = kChunkBytes / sizeof(T);
    // Chunks whose elements a thread holds at once.
    static constexpr int kUnroll = kSoftcap || n == 4 ? 2 : 4;

    const RowPassParams& params;
    const Scales scales;
    Shared& shared;
    uint8_t* const ring;
    const int stages;
    const int64_t vocab, count, clusters;
    const uint32_t rank, size;
    const int64_t cluster;
    const int chunks;  // of a row, in this block

    __device__ Block(const RowPassParams& params, Scales scales, Shared& shared, uint8_t* ring,
                     int stages)
        : params(params),
          scales(scales),
          shared(shared),
          ring(ring),
          stages(stages),
          vocab(params.rows.vocab),
          count(params.rows.count()),
          clusters(gridDim.x / cluster_size()),
          rank(cluster_rank()),
          size(cluster_size()),
          cluster(blockIdx.x / cluster_size()),
          chunks((int)(((vocab + kChunk - 1) / kChunk - rank + size - 1) / size)) {}

    // The first element of this block's i-th chunk.
    __device__ int64_t first_element(int i) const { return (rank + (int64_t)i * size) * kChunk; }
    __device__ uint8_t* stage(int index) const { return ring + index * kStageBytes; }

    // Loads the counted rows of the cluster, as far ahead as there are stages.
    __device__ void load() {
        const bool leader = threadIdx.x % kWarp == 0;
        const uint64_t policy = evict_first_policy();
        Place place;
        for (int64_t row = cluster; row < count; row += kWarp * clusters) {
            uint32_t counted = counted_rows(params.tokens.counted, row, clusters, count);
            for (; leader && counted; counted &= counted - 1) {
                const T* logits = Row<T>(params.rows, row + (__ffs(counted) - 1) * clusters).logits;
                for (int i = 0; i < chunks; ++i, place.advance(stages)) {
                    const int64_t first = first_element(i);
                    const int64_t elements = min(kChunk, vocab - first);
                    const auto begin = reinterpret_cast<uintptr_t>(logits + first);
                    const uintptr_t end = begin + elements * sizeof(T);
                    const uintptr_t from = begin / 16 * 16;
                    const uint32_t bytes = (uint32_t)((end + 15) / 16 * 16 - from);
                    const uint32_t full = shared_address(&shared.full[place.stage]);
                    barrier_wait(shared_address(&shared.empty[place.stage]), place.parity ^ 1,
                                 "an empty stage");
                    barrier_expect(full, bytes);
                    bulk_load(shared_address(stage(place.stage)), reinterpret_cast<void*>(from),
                              bytes, full, policy);
                }
            }
            __syncwarp();
        }
    }

    // The elements of a row in a stage, whatever the alignment of the row.
    __device__ const T* elements(const T* logits, int at) const {
        const uintptr_t shift = kAligned ? 0 : reinterpret_cast<uintptr_t>(logits) % 16;
        return reinterpret_cast<const T*>(stage(at) + shift);
    }

    // The 16 bytes of this thread in a chunk.
    __device__ uint4 vector(const T* chunk) const {
        return shared_load(reinterpret_cast<const uint4*>(chunk) + threadIdx.x);
    }

    // y of the elements of this thread, -inf beyond the row.
    __device__ void values(const T* logits, int at, int64_t first, float* y) const {
        const T* const chunk = elements(logits, at);
        const int64_t mine = first + threadIdx.x * n;
        float z[n];
        if (kAligned) {
            unpack(vector(chunk), z, T{});
        } else {
#pragma unroll
            for (int i = 0; i < n; ++i) z[i] = to_float(shared_load(chunk + threadIdx.x * n + i));
        }
        if (mine + n > vocab) {
#pragma unroll
            for (int i = 0; i < n; ++i) z[i] = mine + i < vocab ? z[i] : -kInf;
        }
#pragma unroll
        for (int i = 0; i < n; ++i) y[i] = transformed<kSoftcap>(z[i], scales);
    }

    __device__ void release(int at) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(&shared.empty[at]));
    }

    // The first pass: the sums of this warp.
    __device__ RowSums first_pass(const T* logits, Place place, bool keep) const {
        Lane lane;
        for (int i = 0; i < chunks; i += kUnroll) {
            float y[kUnroll * n];
#pragma unroll
            for (int step = 0; step < kUnroll; ++step) {
                if (i + step < chunks) {
                    barrier_wait(shared_address(&shared.full[place.stage]), place.parity,
                                 "a chunk");
                    values(logits, place.stage, first_element(i + step), y + step * n);
                    if (!keep) release(place.stage);
                    place.advance(stages);
                } else {
#pragma unroll
                    for (int e = 0; e < n; ++e) y[step * n + e] = -kInf;
                }
            }
            lane.add(y, scales.scale2);
        }
        return warp_total(RowSums::of(lane), scales.scale2);
    }

    // Sends the sums of this warp to every block of the cluster.
    __device__ void send(const RowSums& sums, int turn) {
        const uint32_t to = threadIdx.x % kWarp;
        if (to >= size) return;
        const RowSums* const slot = &shared.sums[turn][rank * kComputeWarps + threadIdx.x / kWarp];
        const uint32_t there = address_in(shared_address(slot), to);
        const uint32_t barrier = address_in(shared_address(&shared.sums_arrived[turn]), to);
        store_async(there, __float_as_uint(sums.origin), barrier);
        store_async(there + 8, __double_as_longlong(sums.sum), barrier);
        store_async(there + 16, __double_as_longlong(sums.weighted), barrier);
    }

    template <bool kBonus>
    __device__ void write_gradient(const Row<T>& row, int64_t label, const SecondPass& pass,
                                   Place place) {
        const int64_t label_vector = label / n;
#pragma unroll 2
        for (int i = 0; i < chunks; ++i, place.advance(stages)) {
            const int64_t first = first_element(i);
            const T* const chunk = elements(row.logits, place.stage);
            const int64_t mine = first + threadIdx.x * n;
            if (kAligned && mine + n <= vocab) {
                float z[n];
                unpack(vector(chunk), z, T{});
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    z[e] = gradient_of<kSoftcap, kBonus>(z[e], pass, scales);
                }
                if (mine / n == label_vector) {
#pragma unroll
                    for (int e = 0; e < n; ++e) z[e] = mine + e == label ? pass.label_grad : z[e];
                }
                store_streaming(row.grad + mine, pack(z, T{}));
            } else {
                // Element by element; neighbouring threads write neighbouring elements.
                const int64_t begin = kAligned ? mine : first + threadIdx.x;
                const int64_t end = kAligned ? vocab : min(vocab, first + kChunk);
                const int step = kAligned ? 1 : kComputeThreads;
                for (int64_t j = begin; j < end; j += step) {
                    const float z = to_float(shared_load(chunk + (j - first)));
                    const float dz = gradient_of<kSoftcap, kBonus>(z, pass, scales);
                    row.grad[j] = from_float<T>(j == label ? pass.label_grad : dz);
                }
            }
            release(place.stage);
        }
    }

    __device__ void fill(const Row<T>& row, float value) const {
        float values[n];
#pragma unroll
        for (int e = 0; e < n; ++e) values[e] = value;
        for (int i = 0; i < chunks; ++i) {
            const int64_t first = first_element(i), mine = first + threadIdx.x * n;
            if (kAligned && mine + n <= vocab) {
                store_streaming(row.grad + mine, pack(values, T{}));
                continue;
            }
            const int64_t begin = kAligned ? mine : first + threadIdx.x;
            const int64_t end = kAligned ? vocab : min(vocab, first + kChunk);
            const int step = kAligned ? 1 : kComputeThreads;
            for (int64_t j = begin; j < end; j += step) row.grad[j] = from_float<T>(value);
        }
    }

    // Whether the second pass may read the row: not if its gradient can only be zero.
    __device__ bool keeps(int64_t index) const {
        const PolicyOptions& options = params.options;
        const bool other_terms = options.kl_loss_coef != 0.0 || options.entropy_coef != 0.0;
        return params.rows.grad != nullptr &&
               (other_terms || params.tokens.advantages[index] != 0.0f);
    }

    __device__ void compute() {
        const bool first_warp = threadIdx.x < kWarp, writes = rank == 0 && threadIdx.x == 0;
        Place place;
        int turn = 0;
        uint32_t turn_parity = 0, counted = 0;
        int64_t step = 0;
        for (int64_t index = cluster; index < count; index += clusters, ++step) {
            if (step % kWarp == 0)
                counted = counted_rows(params.tokens.counted, index, clusters, count);
            const Row<T> row(params.rows, index);
            if (!(counted >> step % kWarp & 1)) {
                if (writes) finish_skipped(params, index);
                if (row.grad != nullptr) fill(row, 0.0f);
                continue;
            }
            const bool keep = keeps(index);
            const int64_t label = params.labels[index];
            const float z_label = first_warp ? row.label_logit(label, vocab) : 0.0f;
            if (threadIdx.x == 0) {
                const uint32_t bytes = size * kComputeWarps * sizeof(RowSums);
                barrier_expect(shared_address(&shared.sums_arrived[turn]), bytes);
            }
            const RowSums sums = first_pass(row.logits, place, keep);
            // Completes the load of the label's logit before the sums are sent: after that, a
            // gradient in place may overwrite it.
            if (threadIdx.x == 0) shared_settle(&shared.z_label, z_label);
            send(sums, turn);
            if (first_warp) {
                barrier_wait(shared_address(&shared.sums_arrived[turn]), turn_parity,
                             "the sums of the cluster");
                const RowSums total =
                    total_of(shared.sums[turn], (int)size * kComputeWarps, scales.scale2);
                const SecondPass pass =
                    finish_statistics<kSoftcap>(params, index, total, z_label, scales, writes);
                if (threadIdx.x == 0) shared_store(&shared.pass, pass);
            }
            block_barrier(kComputeBarrier, kComputeThreads);
            const SecondPass pass = shared_load(&shared.pass);
            const bool reads_again = keep && pass.action == SecondPass::kGradient;
            if (reads_again && pass.a != 0.0f) {
                write_gradient<true>(row, label, pass, place);
            } else if (reads_again) {
                write_gradient<false>(row, label, pass, place);
            } else if (pass.action == SecondPass::kGradient) {
                fill(row, NAN);  // only if its statistics are NaN
            } else if (pass.action == SecondPass::kZeros) {
                fill(row, 0.0f);
            }
            for (int i = 0; i < chunks; ++i, place.advance(stages)) {
                if (keep && !reads_again) release(place.stage);
            }
            turn_parity ^= turn;
            turn ^= 1;
        }
    }
};

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_pass_cluster_kernel(const __grid_constant__ RowPassParams params, Scales scales,
                            int stages) {
    uint8_t* const memory = dynamic_shared_memory();
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), kComputeWarps);
        }
        for (int turn = 0; turn < 2; ++turn) {
            barrier_init(shared_address(&shared.sums_arrived[turn]), 1);
        }
        barrier_init_fence();
    }
    __syncwarp();
    cluster_sync();
    Block<T, kSoftcap, kAligned> block(params, scales, shared, memory + sizeof(Shared), stages);
    if (threadIdx.x < kComputeThreads) {
        block.compute();
    } else {
        block.load();
    }
    __syncwarp();
    cluster_sync();  // no block leaves while another may still write into its memory
}

// As many clusters as run at once; `fits` is false where none can, as on some partitions of a GPU.
template <typename T, bool kSoftcap, bool kAligned>
cudaError_t launch_clusters(const RowPassParams& params, const ClusterPlan& plan,
                            cudaStream_t stream, bool& fits) {
    const auto kernel = row_pass_cluster_kernel<T, kSoftcap, kAligned>;
    const int bytes = (int)sizeof(Shared) + plan.stages * kStageBytes;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;

    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {(unsigned)plan.cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.blockDim = kThreads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    config.gridDim = plan.cluster;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    fits = error != cudaSuccess || clusters > 0;
    if (error != cudaSuccess || !fits) return error;
    const int64_t used = std::min<int64_t>(clusters, params.rows.count());
    config.gridDim = (unsigned)(plan.cluster * used);
    return cudaLaunchKernelEx(&config, kernel, params, scales_of(params.rows.transform),
                              plan.stages);
}

}  // namespace

bool row_pass_cluster(const RowPassParams& params, void* stream, const char** error) {
    if (params.rows.count() == 0) return true;
    const ClusterPlan plan = plan_on_this_device(params.rows, sizeof(Shared));
    if (plan.cluster == 0) return false;
    bool fits = true;
    *error = message_of(with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch_clusters<T, kSoftcap, kAligned>(params, plan,
                                                      static_cast<cudaStream_t>(stream), fits);
    }));
    return fits;
}

int planned_cluster(const LogitRows& rows) {
    return plan_on_this_device(rows, sizeof(Shared)).cluster;
}

}  // namespace bapo::cuda
