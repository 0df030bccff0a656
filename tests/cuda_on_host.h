// CUDA's words on the host, so that kernels run without a GPU: threads of a block are threads, blocks take turns.
// Compiled with KERNEL, the path of the kernel, the kernel's constants, and THREADS of a block.

#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct Index {
    int x;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

static thread_local Index threadIdx;
static Index blockIdx, blockDim{THREADS};
static std::unique_ptr<std::barrier<>> block, warps[THREADS / 32];

static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __fdividef(float a, float b) { return a / b; }
static void __syncthreads() { block->arrive_and_wait(); }

template <class Kernel>
static void run_blocks(int blocks, Kernel kernel) {
    block = std::make_unique<std::barrier<>>(THREADS);
    for (auto &warp : warps) warp = std::make_unique<std::barrier<>>(32);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        std::vector<std::thread> threads;
        for (int t = 0; t < THREADS; t++)
            threads.emplace_back([=] {
                threadIdx.x = t;
                kernel();
            });
        for (auto &thread : threads) thread.join();
    }
}
