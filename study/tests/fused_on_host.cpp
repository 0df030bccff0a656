// The kernel of `mcbn_study.regression.fused` on the host.

#include "cuda_on_host.h"

#define SHARED(type, name) type *name = (type *)shared_memory
#define ROOT(r, v) r = std::sqrt(v)
#define THREAD(t) t = threadIdx.x
#define NETWORK(s) s = blockIdx.x
#define WAIT(cycles) (void)(cycles)

static void *shared_memory;
static float exchanged[THREADS];

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
                    float *scratch, float *p, float *m, float *v, int k) {
    std::vector<float4> memory((bytes + 15) / 16);
    shared_memory = memory.data();
    run_blocks(blocks, [=] { fused(x, y, uniform, streams, rates, decays, corrections, scratch, p, m, v, k); });
}
