// The launch of a kernel with clusters, unless the device refuses it; host code on cluster_plan.h
// and dispatch.cuh. An error that is taken for a refusal would let the slower row pass hide it.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "cluster_plan.h"
#include "dispatch.cuh"
#include "launch_cuda.h"

namespace bapo::cuda {

// Occupancy by kernel, device, cluster and stages; the query takes longer than a launch.
using OccupancyKey = std::tuple<const void*, int, int, int>;
inline std::map<OccupancyKey, int> occupancy_cache;
inline std::mutex occupancy_mutex;

// Prepares the kernel, and finds how many clusters run at once: none on some partitions of a GPU.
// `refused` tells whether the query failed.
inline cudaError_t max_active_clusters(const cudaLaunchConfig_t& config, const OccupancyKey& key,
                                       int& clusters, bool& refused) {
    const std::lock_guard lock(occupancy_mutex);
    const auto known = occupancy_cache.find(key);
    if (known != occupancy_cache.end()) {
        clusters = known->second;
        return cudaSuccess;
    }
    const auto& [kernel, device, cluster, stages] = key;
    cudaFuncAttributes attributes{};
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    if (attributes.ptxVersion < 90) {  // the driver compiled PTX of an older architecture
        clusters = occupancy_cache[key] = 0;
        return cudaSuccess;
    }
    // The most there may be, so that threads with other plans do not reduce it.
    const std::pair<cudaFuncAttribute, int> wanted[] = {
        {cudaFuncAttributeMaxDynamicSharedMemorySize,
         device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) -
             (int)attributes.sharedSizeBytes},
        {cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared},
        {cudaFuncAttributeNonPortableClusterSizeAllowed, cluster > kPortableCluster},
    };
    for (const auto& [attribute, value] : wanted) {
        if (value == 0) continue;
        error = cudaFuncSetAttribute(kernel, attribute, value);
        if (error != cudaSuccess) return error;
    }
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    refused = error != cudaSuccess;
    if (!refused) occupancy_cache[key] = clusters;
    return error;
}

// Errors of a launch after which the device still runs other kernels.
inline bool is_refusal(cudaError_t error) {
    return error == cudaErrorInvalidClusterSize || error == cudaErrorInvalidConfiguration ||
           error == cudaErrorLaunchOutOfResources;
}

// Launches kernel(arguments...) on as many clusters as run at once, at most one for each row;
// `fits` is false where none can. A refusal is remembered.
template <typename... Parameters, typename... Arguments>
const char* launch_clusters(void (*kernel)(Parameters...), const ClusterPlan& plan, int threads,
                            int head_bytes, int64_t rows, void* stream, bool& fits,
                            Arguments... arguments) {
    // Blocks of one cluster decide at the same time, so they should not share a multiprocessor.
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)plan.cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
    cudaLaunchConfig_t config{};
    config.blockDim = threads;
    config.dynamicSmemBytes = head_bytes + plan.stages * kStageBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    config.gridDim = plan.cluster;
    int device = 0, clusters = 0;
    bool refused = false;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return message_of(error);
    const auto function = reinterpret_cast<const void*>(kernel);
    const OccupancyKey key{function, device, plan.cluster, plan.stages};
    error = max_active_clusters(config, key, clusters, refused);
    if (error == cudaSuccess && clusters > 0) {
        config.gridDim = (unsigned)(plan.cluster * std::min<int64_t>(clusters, rows));
        error = cudaLaunchKernelEx(&config, kernel, arguments...);
        refused = is_refusal(error);
    }
    const char* const message = message_of(error, function, config);
    fits = !refused && (error != cudaSuccess || clusters > 0);
    if (!refused) return message;
    warn_of_refusal(message);
    const std::lock_guard lock(occupancy_mutex);
    occupancy_cache[key] = 0;
    return nullptr;
}

}  // namespace bapo::cuda
