// The row pass for sm_90 and later, on the cluster_*.cuh: a row lies in the shared memory of a
// cluster of blocks, so that both passes read it on chip and it crosses the memory bus once. A wait
// that is lost shows in tests/cuda_on_host.

#include "cluster_decision.cuh"
#include "cluster_exchange.cuh"
#include "cluster_launch.cuh"

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
    Exchange exchange;
    Decisions decisions;
};

// One warp of a block loads, four compute. A chunk stays in its stage until the second pass has
// read it. The stage then gets a chunk of a later row: loads are in flight while gradients are
// written.
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
    const int64_t count;
    const Share share;
    const int chunks;  // of a row, in this block

    __device__ Block(const RowPassParams& params, Scales scales, Shared& shared, Ring ring)
        : params(params),
          scales(scales),
          shared(shared),
          ring(ring),
          vocab((int)params.rows.vocab),
          count(params.rows.count()),
          chunks(share.among((vocab + kChunk - 1) / kChunk)) {}

    // Loads the counted rows of the cluster, as far ahead as there are stages.
    __device__ void load() {
        const uint64_t policy = evict_first_policy();
        Place place{ring.begin};
        for (int64_t first = share.cluster; first < count; first += kWarp * share.clusters) {
            uint32_t counted = counted_rows(params.tokens.counted, first, share.clusters, count);
            for (; counted; counted &= counted - 1) {
                const Row<T, kAligned> row(params.rows,
                                           first + (__ffs(counted) - 1) * share.clusters);
                load_chunks(row, share, chunks, ring, place, policy);
            }
        }
    }

    template <int k, bool kWait>
    __device__ ChunkVectors<k> read(Place& place, uint32_t offset) const {
        return read_chunks<T, kAligned, kWait, k>(ring, place, offset);
    }

    // The first pass: the sums of this warp.
    __device__ RowSums first_pass(const Row<T, kAligned>& row, int label, Place place,
                                  bool keep) const {
        Lane<T, kSoftcap> lane;
        const int whole = share.among(vocab / kChunk);
        // This block's chunk in which this thread has the label.
        const bool has_label = label >= 0 && share.has(label / n);
        const int label_chunk = has_label ? label / kChunk >> share.log_blocks : -kFirst;
        const int element = label % n;
        int i = 0;
        const auto add = [&]<int k>() {
            auto some = read<k, true>(place, row.shift);
            if (!keep) some.release();
            const int first = share.chunk(i) * kChunk + threadIdx.x * n;
            if (k == 1 && i == whole) some.raw[0] = cut(some.raw[0], vocab - first, T{});
            lane.add(some.raw, label_chunk - i, element, scales);
            i += k;
        };
        while (i + kFirst <= whole) add.template operator()<kFirst>();
        if (i + kFirst / 2 <= whole) add.template operator()<kFirst / 2>();
        while (i < chunks) add.template operator()<1>();
        return warp_total(RowSums::of(lane), scales.scale2);
    }

    // Whether this thread writes a vector of the gradient; the first thread writes its head.
    __device__ bool writes(int vector) const { return share.has(max(vector, 0)); }

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
            gradients<kBonus>(read<1, false>(here, row.shift).raw[0], pass, dz);
            store_elements(row.grad, dz, row.head);
        }
        const uint32_t offset = row.shift + row.head * sizeof(T);
        const int whole = share.among(row.vectors / kComputeThreads);
        const int64_t stride = (int64_t)share.blocks * kChunk;
        int vector = share.rank * kComputeThreads + threadIdx.x, i = 0;
        T* to = row.vector(vector);
        for (; i + kSecond <= whole; i += kSecond) {
            const auto some = read<kSecond, false>(place, offset);
            some.release();
#pragma unroll
            for (int k = 0; k < kSecond; ++k, to += stride) {
                gradients<kBonus>(some.raw[k], pass, dz);
                store_streaming(to, pack(dz, T{}));
            }
        }
        for (; i < chunks; ++i, to += stride) {
            const auto one = read<1, false>(place, offset);
            one.release();
            gradients<kBonus>(one.raw[0], pass, dz);
            const int here = share.chunk(i) * kComputeThreads + threadIdx.x;
            if (here < row.vectors) store_streaming(to, pack(dz, T{}));
            if (here == row.vectors) store_elements(to, dz, row.tail());
        }
        // The same thread wrote there, so that its stores are ordered.
        if (label >= 0 && writes(row.vector_of(label))) {
            row.grad[label] = from_float<T>(pass.label_grad);
        }
    }

    __device__ void fill(const Row<T, kAligned>& row, float value) const {
        float values[n];
#pragma unroll
        for (float& each : values) each = value;
        const int stride = share.blocks * kComputeThreads;
        for (int i = share.rank * kComputeThreads + threadIdx.x; i < row.vectors; i += stride) {
            store_streaming(row.vector(i), pack(values, T{}));
        }
        if (writes(-1)) store_elements(row.grad, values, row.head);
        if (writes(row.vectors)) store_elements(row.vector(row.vectors), values, row.tail());
    }

    // Writes what was decided, and releases the stages that were kept.
    __device__ void second_pass(const Row<T, kAligned>& row, int label, bool keep, Place place) {
        const SecondPass pass = shared_load(&shared.decisions.pass);
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
            ChunkVectors<1>{{place.stage}, {}}.release();
        }
    }

    __device__ void compute() {
        Place place{ring.begin};
        Turn turn;
        const bool gradients = params.rows.grad != nullptr;
        // All warps but the first decide in turn, so that no part of a multiprocessor has more to
        // do: the first may share one with the loading warp. Without gradients one block decides,
        // and after each of its warps it is the next block's turn.
        int k = 0, decider = 1, deciding_rank = 0;
        bool decides = false;
        NextRows next{};
        // If there are no gradients, warps wait only here for sums that they do not read, and that
        // have long arrived.
        const auto wait_for_sums_before = [&](bool decided) {
            if (!gradients && !decided) shared.exchange.wait_for_row_before(turn);
        };
        for (int64_t index = share.cluster; index < count;
             index += share.clusters, k = (k + 1) % kWarp) {
            if (k == 0) {
                next = next_rows(params, scales, index, share.clusters, count, vocab,
                                 shared.decisions.fields);
                block_barrier(kComputeBarrier, kComputeThreads);  // another warp may decide
            }
            const Row<T, kAligned> row(params.rows, index);
            if (!(next.counted >> k & 1)) {
                if (share.rank == 0 && threadIdx.x == 0) finish_skipped(params, index);
                if (row.grad != nullptr) fill(row, 0.0f);
                continue;
            }
            const bool keep = next.kept >> k & 1;
            const int label = __shfl_sync(kAllLanes, next.label, k);
            scales.scale2 = __shfl_sync(kAllLanes, next.scale2, k);
            // In a register: a constant would be loaded again for every element.
            if (kSoftcap) scales.inner = __shfl_sync(kAllLanes, scales.inner, 0);
            const bool decided = decides;  // on the row before
            decides = threadIdx.x / kWarp == decider && (gradients || share.rank == deciding_rank);
            const T stored = decides ? row.stored_label(label) : T{};
            const RowSums sums = first_pass(row, label, place, keep);
            const float z_label = label_logit(label, stored);
            // Completes the load of the label's logit: once the sums are sent, a gradient in place
            // may overwrite it.
            if (gradients && decides && threadIdx.x % kWarp == 0) {
                shared_settle(&shared.decisions.z_label, z_label);
            }
            // These sums replace those of two rows before, which a block has read before it sent
            // those in between.
            wait_for_sums_before(decided);
            shared.exchange.send(sums, share, turn);
            if (decides) {
                const Transform transform =
                    params.rows.transform.at(__shfl_sync(kAllLanes, next.temperature, k));
                const auto about_label = label_of<kSoftcap>(label, z_label, transform, scales);
                const RowSums total = shared.exchange.wait_for_total(share, turn, scales.scale2);
                decide_row(params, shared.decisions, index, k, total, about_label, transform,
                           scales, share.rank == 0);
            }
            if (gradients) {
                block_barrier(kComputeBarrier, kComputeThreads);
                second_pass(row, label, keep, place);
            }
            place.advance(ring, chunks);
            turn.advance();
            if (++decider < kComputeWarps) continue;
            decider = 1;
            deciding_rank = (deciding_rank + 1) & (share.blocks - 1);
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
        ring.init_barriers();
        shared.exchange.init_barriers();
        shared_store(&shared.decisions.range, bounds_range(params));
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

}  // namespace

bool row_pass_cluster(const RowPassParams& params, void* stream, const char** error) {
    const int64_t rows = params.rows.count();
    if (rows == 0) return true;
    const ClusterPlan plan = plan_on_this_device(params.rows, sizeof(Shared));
    if (plan.cluster == 0) return false;
    bool fits = true;
    *error = with_row_type(params.rows, [&]<typename T, bool kSoftcap, bool kAligned>() {
        return launch_clusters(row_pass_cluster_kernel<T, kSoftcap, kAligned>, plan, kThreads,
                               sizeof(Shared), rows, stream, fits, params,
                               scales_of(params.rows.transform), plan.stages);
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
