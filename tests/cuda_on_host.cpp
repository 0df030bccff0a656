// CUDA's words on the host, so that fused_kernel.cu runs without a GPU: threads of a block are threads, blocks take
// turns. Compiled with KERNEL, the path of the kernel, and the kernel's constants.

#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED(type, name) type *name = (type *)shared_memory
#define ROOT(r, v) r = std::sqrt(v)
#define THREAD(t) t = threadIdx.x
#define NETWORK(s) s = blockIdx.x
#define WAIT(cycles) (void)(cycles)

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
static Index blockIdx;
static void *shared_memory;
static float exchanged[THREADS];
static std::unique_ptr<std::barrier<>> block, warps[THREADS / 32];

static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __fdividef(float a, float b) { return a / b; }
static void __syncthreads() { block->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float v, int k) {
    auto &warp = *warps[threadIdx.x / 32];
    exchanged[threadIdx.x] = v;
    warp.arrive_and_wait();
    v = exchanged[threadIdx.x ^ k];
    warp.arrive_and_wait();
    return v;
}

#include KERNEL

extern "C" void run(int blocks, long long bytes, const float *x, const float *y, const float *uniform,
                    const long long *streams, const float *rates, const float *decays, const float *corrections,
                    float *scratch, float *p, float *m, float *v, long long k) {
    std::vector<float4> memory((bytes + 15) / 16);
    shared_memory = memory.data();
    block = std::make_unique<std::barrier<>>(THREADS);
    for (auto &warp : warps) warp = std::make_unique<std::barrier<>>(32);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        std::vector<std::thread> threads;
        for (int t = 0; t < THREADS; t++)
            threads.emplace_back([=] {
                threadIdx.x = t;
                train(x, y, uniform, streams, rates, decays, corrections, scratch, p, m, v, k);
            });
        for (auto &thread : threads) thread.join();
    }
}
