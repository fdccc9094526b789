// The row pass for sm_90 and later: a row lies in the shared memory of a cluster of blocks, so that
// both passes read it on chip and it crosses the memory bus once.
//
// One warp of a block loads, four compute. Rows are cut into chunks of 2 KB, which the blocks of
// the cluster take in turn. A chunk stays in its stage of shared memory until the second pass has
// read it; the stage is then filled with a chunk of a later row, so that loads are in flight while
// gradients are written. The warps send their sums to every block, and every block takes the same
// decision. Includes the headers of devices alone; a wait that is lost shows in tests/cuda_on_host.

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "cluster_plan.h"
#include "cuda/ptx.cuh"
#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

namespace {

constexpr int kThreads = kComputeThreads + kWarp;
constexpr int kComputeBarrier = 1;  // 0 is __syncthreads
#if defined(__CUDA_ARCH__)
constexpr int kBlocks = blocks_per_multiprocessor(__CUDA_ARCH__ / 100);
#else
constexpr int kBlocks = 1;
#endif

// The head of the dynamic shared memory; the ring of stages follows.
struct alignas(128) Shared {
    uint64_t sums_arrived[2];
    PartialSums<kMaxCluster * kComputeWarps> sums[2];
    BoundsRange range;
    // Of the cluster's next 32 rows, for the warp that decides.
    TokenFields fields[kWarp];
    SecondPass pass;
    float z_label;
};
static_assert(kComputeThreads == kComputeWarps * kWarp);
constexpr int kSumsBytes = sizeof(double2) + sizeof(float);  // of a warp

// The stages, as addresses in shared memory.
struct Ring {
    uint32_t begin;
    uint32_t end;
};

// The position of a chunk in the ring.
struct Place {
    uint32_t stage;
    uint32_t parity = 0;

    __device__ void advance(const Ring& ring) {
        stage += kStageBytes;
        if (stage == ring.end) {
            stage = ring.begin;
            parity ^= 1;
        }
    }
    // By the chunks of a row, of which there are fewer than stages.
    __device__ void advance(const Ring& ring, int chunks) {
        stage += chunks * kStageBytes;
        if (stage >= ring.end) {
            stage -= ring.end - ring.begin;
            parity ^= 1;
        }
    }
};

// What a thread holds of some chunks.
template <int k>
struct Group {
    uint32_t stages[k];
    uint4 raw[k];
};

// Which of the rows first, first + step, ... are counted, 32 at a time: bit k is row first +
// k*step.
__device__ uint32_t counted_rows(const bool* counted, int64_t first, int64_t step, int64_t count) {
    const int64_t row = first + (threadIdx.x % kWarp) * step;
    return __ballot_sync(kAllLanes, row < count && counted[row]);
}

__device__ int log2_of(int power_of_two) { return __ffs(power_of_two) - 1; }

template <typename T, bool kSoftcap, bool kAligned>
struct Block {
    static constexpr int n = kVec<T>;
    static constexpr int kChunk = kChunkBytes / sizeof(T);
    // Chunks that a thread works on at once, in the first and in the second pass.
    static constexpr int kFirst = 4;
    static constexpr int kSecond = 2;

    const RowPassParams& params;
    Scales scales;  // of the row that is computed
    Shared& shared;
    const Ring ring;
    const int vocab;
    const int64_t count, clusters;
    const int rank, size, log_size;  // divisions by the size would take longer than shifts
    const int64_t cluster;
    const int chunks;  // of a row, in this block

    __device__ Block(const RowPassParams& params, Scales scales, Shared& shared, Ring ring)
        : params(params),
          scales(scales),
          shared(shared),
          ring(ring),
          vocab((int)params.rows.vocab),
          count(params.rows.count()),
          clusters(gridDim.x / cluster_size()),
          rank((int)cluster_rank()),
          size((int)cluster_size()),
          log_size(log2_of(size)),
          cluster(blockIdx.x / cluster_size()),
          chunks(dealt((vocab + kChunk - 1) / kChunk)) {}

    // How many of this many first chunks of a row are dealt to this block.
    __device__ int dealt(int chunks) const { return (chunks - rank + size - 1) >> log_size; }
    // The index in the row of this block's i-th chunk.
    __device__ int chunk(int i) const { return rank + i * size; }

    // Loads the counted rows of the cluster, as far ahead as there are stages.
    __device__ void load() {
        const uint64_t policy = evict_first_policy();
        Place place{ring.begin};
        for (int64_t first = cluster; first < count; first += kWarp * clusters) {
            uint32_t counted = counted_rows(params.tokens.counted, first, clusters, count);
            for (; counted; counted &= counted - 1) {
                load_row({params.rows, first + (__ffs(counted) - 1) * clusters}, place, policy);
            }
        }
    }
    // Of a row that is not aligned, the first and the last copy have up to 14 bytes of the rows
    // beside, which others may be writing in place. PTX ISA 9.7.9.25.1 leaves a copy of changing
    // bytes undefined; these are cut away before they are used.
    __device__ void load_row(const Row<T, kAligned>& row, Place& place, uint64_t policy) const {
        const auto up = [](uint32_t bytes) { return (bytes + 15) / 16 * 16; };
        // The gradient's last vector of a chunk takes as many elements from the next one as the
        // head of the row has.
        const uint32_t most = up(row.shift + kChunkBytes + row.head * sizeof(T));
        const uint32_t step = size * kChunkBytes;
        uint32_t left = up(row.shift + vocab * sizeof(T)) - rank * kChunkBytes;
        auto from = reinterpret_cast<uintptr_t>(row.logits) / 16 * 16 + rank * kChunkBytes;
        for (int i = chunks; i > 0; --i, place.advance(ring), from += step, left -= step) {
            const uint32_t bytes = min(most, left);
            barrier_wait(place.stage + kEmpty, place.parity ^ 1, "an empty stage");
            if (!elected()) continue;
            barrier_expect(place.stage + kFull, bytes);
            bulk_load(place.stage, reinterpret_cast<void*>(from), bytes, place.stage + kFull,
                      policy);
        }
    }

    // The vectors of this thread in the next chunks, which start `offset` bytes after the stages.
    template <int k, bool kWait>
    __device__ Group<k> group(Place& place, uint32_t offset) const {
        Group<k> group;
        const uint32_t mine = threadIdx.x * 16 + offset / 16 * 16;
#pragma unroll
        for (int i = 0; i < k; ++i, place.advance(ring)) {
            if (kWait) barrier_wait(place.stage + kFull, place.parity, "a chunk");
            group.stages[i] = place.stage;
            group.raw[i] = shared_vector(place.stage + mine);
        }
        if (!kAligned && offset % 16 != 0) {
#pragma unroll
            for (int i = 0; i < k; ++i) {
                const uint4 next = shared_vector(group.stages[i] + mine + 16);
                group.raw[i] = shifted(group.raw[i], next, offset % 16, T{});
            }
        }
        return group;
    }

    template <int k>
    __device__ void release(const Group<k>& group) const {
        __syncwarp();
        if (threadIdx.x % kWarp != 0) return;
#pragma unroll
        for (int i = 0; i < k; ++i) barrier_arrive(group.stages[i] + kEmpty);
    }

    // The first pass: the sums of this warp.
    __device__ RowSums first_pass(const Row<T, kAligned>& row, int label, Place place,
                                  bool keep) const {
        Lane<T, kSoftcap> lane;
        const int whole = dealt(vocab / kChunk);
        // This block's chunk in which this thread has the label.
        const bool has_label = label >= 0 && deals(label / n);
        const int label_chunk = has_label ? label / kChunk >> log_size : -kFirst;
        const int element = label % n;
        int i = 0;
        const auto add = [&]<int k>() {
            auto some = group<k, true>(place, row.shift);
            if (!keep) release(some);
            const int first = chunk(i) * kChunk + threadIdx.x * n;
            if (k == 1 && i == whole) some.raw[0] = cut(some.raw[0], vocab - first, T{});
            lane.add(some.raw, label_chunk - i, element, scales);
            i += k;
        };
        while (i + kFirst <= whole) add.template operator()<kFirst>();
        if (i + kFirst / 2 <= whole) add.template operator()<kFirst / 2>();
        while (i < chunks) add.template operator()<1>();
        return warp_total(RowSums::of(lane), scales.scale2);
    }

    // Sends the sums of this warp to every block of the cluster, of which each expects the same
    // from this warp of the others. A block alone stores them: st.async needs a cluster of two or
    // more.
    __device__ void send(const RowSums& sums, int turn) {
        const int to = threadIdx.x % kWarp, slot = rank * kComputeWarps + threadIdx.x / kWarp;
        const uint32_t arrived = shared_address(&shared.sums_arrived[turn]);
        auto& all = shared.sums[turn];
        if (size == 1) {
            if (to == 0) all.store(slot, sums);
            __syncwarp();
            if (to == 0) barrier_arrive(arrived);
            return;
        }
        if (to == 0) barrier_expect(arrived, size * kSumsBytes);
        if (to >= size) return;
        const auto there = [&](const void* here) { return address_in(shared_address(here), to); };
        const uint32_t barrier = address_in(arrived, to);
        store_async(there(&all.sums[slot]), double2{sums.sum, sums.weighted}, barrier);
        store_async(there(&all.origins[slot]), sums.origin, barrier);
    }

    // Vectors of a row are dealt to the threads of the cluster in turn.
    __device__ bool deals(int vector) const {
        return (vector / kComputeThreads & (size - 1)) == rank &&
               vector % kComputeThreads == threadIdx.x;
    }
    // The head of a gradient is written by the first thread.
    __device__ bool writes(int vector) const { return deals(max(vector, 0)); }

    template <bool kBonus>
    __device__ void gradients(uint4 raw, const SecondPass& pass, float (&dz)[n]) const {
        unpack(raw, dz, T{});
#pragma unroll
        for (float& each : dz) each = gradient_of<kSoftcap, kBonus>(each, pass, scales);
    }

    // The second pass. The vectors of a chunk are those that start in it.
    template <bool kBonus>
    __device__ void write_gradient(const Row<T, kAligned>& row, int label, const SecondPass& pass,
                                   Place place) const {
        float dz[n];
        if (!kAligned && row.head > 0 && writes(-1)) {
            Place here = place;
            gradients<kBonus>(group<1, false>(here, row.shift).raw[0], pass, dz);
            store_elements(row.grad, dz, row.head);
        }
        const uint32_t offset = row.shift + row.head * sizeof(T);
        const int whole = dealt(row.vectors / kComputeThreads);
        const int64_t stride = (int64_t)size * kChunk;
        int vector = rank * kComputeThreads + threadIdx.x, i = 0;
        T* to = row.vector(vector);
        for (; i + kSecond <= whole; i += kSecond) {
            const auto some = group<kSecond, false>(place, offset);
            release(some);
#pragma unroll
            for (int k = 0; k < kSecond; ++k, to += stride) {
                gradients<kBonus>(some.raw[k], pass, dz);
                store_streaming(to, pack(dz, T{}));
            }
        }
        for (; i < chunks; ++i, to += stride) {
            const auto one = group<1, false>(place, offset);
            release(one);
            gradients<kBonus>(one.raw[0], pass, dz);
            const int here = chunk(i) * kComputeThreads + threadIdx.x;
            if (here < row.vectors) store_streaming(to, pack(dz, T{}));
            if (here == row.vectors) store_elements(to, dz, row.tail());
        }
        // Over what the same thread wrote there.
        if (label >= 0 && writes(row.vector_of(label))) {
            row.grad[label] = from_float<T>(pass.label_grad);
        }
    }

    __device__ void fill(const Row<T, kAligned>& row, float value) const {
        float values[n];
#pragma unroll
        for (float& each : values) each = value;
        const int stride = size * kComputeThreads;
        for (int i = rank * kComputeThreads + threadIdx.x; i < row.vectors; i += stride) {
            store_streaming(row.vector(i), pack(values, T{}));
        }
        if (writes(-1)) store_elements(row.grad, values, row.head);
        if (writes(row.vectors)) store_elements(row.vector(row.vectors), values, row.tail());
    }

    // Of the cluster's next 32 rows, those that are counted, and those that the second pass may
    // read: not if their gradient can only be zero.
    struct NextRows {
        uint32_t counted;
        uint32_t kept;
        // Of this lane's row:
        int label;
        float temperature;
        float scale2;
    };
    // Loads what the decisions need, so that they do not wait for it.
    __device__ NextRows next_rows(int64_t first) {
        const PolicyOptions& options = params.options;
        const bool other_terms = options.kl_loss_coef != 0.0 || options.entropy_coef != 0.0;
        const bool gradients = params.rows.grad != nullptr;
        const uint32_t counted = counted_rows(params.tokens.counted, first, clusters, count);
        const int lane = threadIdx.x % kWarp;
        const int64_t row = first + lane * clusters;
        const bool mine = counted >> lane & 1;
        const bool kept = mine && gradients && (other_terms || params.tokens.advantages[row] != 0);
        const int64_t label = mine ? params.labels[row] : -1;
        const Transform& transform = params.rows.transform;
        const bool own = mine && transform.temperatures != nullptr;
        const float temperature = own ? transform.temperatures[row] : 1.0f;
        const NextRows next{counted, __ballot_sync(kAllLanes, kept), label_index(label, vocab),
                            temperature,
                            own ? scale2_of(transform.at(temperature)) : scales.scale2};
        if (threadIdx.x < kWarp) {
            if (mine && gradients) {
                shared_store(&shared.fields[lane], fields_at(params.tokens, row));
            }
        }
        return next;
    }

    // The decision of a warp on a row, with `k` its position among the next 32.
    __device__ void decide(int64_t index, int k, const RowSums& total, const Label& label,
                           const Transform& transform) {
        const bool gradients = params.rows.grad != nullptr;
        const bool first_lane = threadIdx.x % kWarp == 0;
        const bool first = first_lane && (rank == 0 || !gradients);
        const RowStatistics row =
            row_statistics(params, index, total, label, transform, scales, first);
        if (!gradients) return;
        const SecondPass pass =
            decided_pass(params, index, shared_load(&shared.range), shared_load(&shared.fields[k]),
                         row, label, transform, first);
        if (first_lane) shared_store(&shared.pass, pass);
    }

    // Writes what was decided, and releases the stages that were kept.
    __device__ void second_pass(const Row<T, kAligned>& row, int label, bool keep, Place place) {
        const SecondPass pass = shared_load(&shared.pass);
        const bool reads_again = keep && pass.action == SecondPass::kGradient;
        if (reads_again && pass.a != 0.0f) {
            write_gradient<true>(row, label, pass, place);
        } else if (reads_again) {
            write_gradient<false>(row, label, pass, place);
        } else if (pass.action == SecondPass::kGradient) {
            fill(row, NAN);  // only if its statistics or its weight are NaN
        } else if (pass.action == SecondPass::kZeros) {
            fill(row, 0.0f);
        }
        if (!keep || reads_again) return;
        for (int i = 0; i < chunks; ++i, place.advance(ring)) {
            release(Group<1>{{place.stage}, {}});
        }
    }

    __device__ void compute() {
        Place place{ring.begin};
        const bool gradients = params.rows.grad != nullptr;
        // The warps but the first, beside which the loading one may lie, decide in turn: no part of
        // a multiprocessor should have more to do than others. Without gradients one block decides,
        // and after each of these warps it is the next one's turn.
        int turn = 0, k = 0, decider = 1, deciding_rank = 0;
        bool decides = false;
        uint32_t turn_parity = 0;
        NextRows next{};
        // Without gradients no warp waits for sums that it does not read but here, where they have
        // long arrived.
        const auto wait_for_sums_before = [&](bool decided) {
            if (gradients || decided) return;
            barrier_wait<Scope::kCluster>(shared_address(&shared.sums_arrived[turn ^ 1]),
                                          turn_parity ^ turn ^ 1, "the sums of the row before");
        };
        for (int64_t index = cluster; index < count; index += clusters, k = (k + 1) % kWarp) {
            if (k == 0) {
                next = next_rows(index);
                block_barrier(kComputeBarrier, kComputeThreads);  // another warp may decide
            }
            const Row<T, kAligned> row(params.rows, index);
            if (!(next.counted >> k & 1)) {
                if (rank == 0 && threadIdx.x == 0) finish_skipped(params, index);
                if (row.grad != nullptr) fill(row, 0.0f);
                continue;
            }
            const bool keep = next.kept >> k & 1;
            const int label = __shfl_sync(kAllLanes, next.label, k);
            scales.scale2 = __shfl_sync(kAllLanes, next.scale2, k);
            // In a register: a constant would be loaded again for every element.
            if (kSoftcap) scales.inner = __shfl_sync(kAllLanes, scales.inner, 0);
            const bool decided = decides;  // on the row before
            decides = threadIdx.x / kWarp == decider && (gradients || rank == deciding_rank);
            const T stored = decides ? row.stored_label(label) : T{};
            const RowSums sums = first_pass(row, label, place, keep);
            const float z_label = label_logit(label, stored);
            // Completes the load of the label's logit before the sums are sent: after that, a
            // gradient in place may overwrite it.
            if (gradients && decides && threadIdx.x % kWarp == 0) {
                shared_settle(&shared.z_label, z_label);
            }
            // Sums of a row replace those of two rows before, which have been read in every block
            // once it has sent those in between.
            wait_for_sums_before(decided);
            send(sums, turn);
            if (decides) {
                const Transform transform =
                    params.rows.transform.at(__shfl_sync(kAllLanes, next.temperature, k));
                const auto about_label = label_of<kSoftcap>(label, z_label, transform, scales);
                barrier_wait<Scope::kCluster>(shared_address(&shared.sums_arrived[turn]),
                                              turn_parity, "the sums of the cluster");
                const RowSums total =
                    total_of(shared.sums[turn], size * kComputeWarps, scales.scale2);
                decide(index, k, total, about_label, transform);
            }
            if (gradients) {
                block_barrier(kComputeBarrier, kComputeThreads);
                second_pass(row, label, keep, place);
            }
            place.advance(ring, chunks);
            turn_parity ^= turn;
            turn ^= 1;
            if (++decider < kComputeWarps) continue;
            decider = 1;
            deciding_rank = (deciding_rank + 1) & (size - 1);
        }
        wait_for_sums_before(decides);  // no block may leave while they are on their way
    }
};

template <typename T, bool kSoftcap, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_pass_cluster_kernel(const __grid_constant__ RowPassParams params, Scales scales,
                            int stages) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // max_active_clusters is 0 without a body
    uint8_t* const memory = dynamic_shared_memory();
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const uint32_t begin = shared_address(memory) + sizeof(Shared);
    const Ring ring{begin, begin + stages * kStageBytes};
    if (threadIdx.x == 0) {
        for (uint32_t stage = ring.begin; stage < ring.end; stage += kStageBytes) {
            barrier_init(stage + kFull, 1);
            barrier_init(stage + kEmpty, kComputeWarps);
        }
        for (int turn = 0; turn < 2; ++turn) {
            barrier_init(shared_address(&shared.sums_arrived[turn]), kComputeWarps);
        }
        shared_store(&shared.range, bounds_range(params));
        barrier_init_fence();
    }
    __syncwarp();
    cluster_sync();
    Block<T, kSoftcap, kAligned> block(params, scales, shared, ring);
    if (threadIdx.x < kComputeThreads) {
        block.compute();
    } else {
        block.load();
    }
    __syncwarp();
    cluster_sync();  // no block leaves while another may still write into its memory
#endif
}

// Occupancy by kernel, device, cluster and stages; the query takes longer than a launch.
using OccupancyKey = std::tuple<const void*, int, int, int>;
std::map<OccupancyKey, int> occupancy_cache;
std::mutex occupancy_mutex;

// Clusters that run at once: 0 where none can, as on some partitions of a GPU. Prepares the kernel
// for launches the first time. `refused`: the query failed.
template <typename Kernel>
cudaError_t max_active_clusters(Kernel kernel, const ClusterPlan& plan,
                                const cudaLaunchConfig_t& config, const OccupancyKey& key,
                                int& clusters, bool& refused) {
    const std::lock_guard lock(occupancy_mutex);
    const auto known = occupancy_cache.find(key);
    if (known != occupancy_cache.end()) {
        clusters = known->second;
        return cudaSuccess;
    }
    cudaFuncAttributes attributes{};
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    if (attributes.ptxVersion < 90) {  // the driver compiled PTX of an older architecture
        clusters = occupancy_cache[key] = 0;
        return cudaSuccess;
    }
    // As much as there may be, so that threads with other plans do not take it back.
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    if (plan.cluster > kPortableCluster) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    refused = error != cudaSuccess;
    if (!refused) occupancy_cache[key] = clusters;
    return error;
}

// Errors of a launch after which the device still runs other kernels.
bool is_refusal(cudaError_t error) {
    return error == cudaErrorInvalidClusterSize || error == cudaErrorInvalidConfiguration ||
           error == cudaErrorLaunchOutOfResources;
}

// As many clusters as run at once; `fits` is false where none can. A refusal is remembered.
template <typename T, bool kSoftcap, bool kAligned>
const char* launch_clusters(const RowPassParams& params, const ClusterPlan& plan,
                            cudaStream_t stream, bool& fits) {
    const auto kernel = row_pass_cluster_kernel<T, kSoftcap, kAligned>;
    // Two blocks of one cluster would decide at the same time, so they should not share a
    // multiprocessor.
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)plan.cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
    cudaLaunchConfig_t config{};
    config.blockDim = kThreads;
    config.dynamicSmemBytes = sizeof(Shared) + plan.stages * kStageBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    config.gridDim = plan.cluster;
    int device = 0, clusters = 0;
    bool refused = false;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return message_of(error);
    const auto function = reinterpret_cast<const void*>(kernel);
    const OccupancyKey key{function, device, plan.cluster, plan.stages};
    error = max_active_clusters(kernel, plan, config, key, clusters, refused);
    if (error == cudaSuccess && clusters > 0) {
        const int64_t used = std::min<int64_t>(clusters, params.rows.count());
        config.gridDim = (unsigned)(plan.cluster * used);
        error = cudaLaunchKernelEx(&config, kernel, params, scales_of(params.rows.transform),
                                   plan.stages);
        refused = is_refusal(error);
    }
    const char* const message = message_of(error, function, config);
    fits = !refused && (error != cudaSuccess || clusters > 0);
    if (!refused) return message;
    cudaGetLastError();  // forgets it
    warn_of_refusal(message);
    const std::lock_guard lock(occupancy_mutex);
    occupancy_cache[key] = 0;
    return nullptr;
}

}  // namespace

bool row_pass_cluster(const RowPassParams& params, void* stream, const char** error) {
    if (params.rows.count() == 0) return true;
    const ClusterPlan plan = plan_on_this_device(params.rows, sizeof(Shared));
    if (plan.cluster == 0) return false;
    bool fits = true;
    *error = with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch_clusters<T, kSoftcap, kAligned>(params, plan,
                                                      static_cast<cudaStream_t>(stream), fits);
    });
    return fits;
}

void clear_occupancy_cache() {
    const std::lock_guard lock(occupancy_mutex);
    occupancy_cache.clear();
}

int planned_cluster(const LogitRows& rows) {
    return plan_on_this_device(rows, sizeof(Shared)).cluster;
}

}  // namespace bapo::cuda
