// The kernel of `mcbn_study.regression.fused.dropped_moments` on the host.

#include "cuda_on_host.h"

#define SHARED(type, name) type *name = (type *)shared_memory

static void *shared_memory;

#include KERNEL

extern "C" void run(int blocks, long long bytes, const float *x, const long long *keys, const long long *streams,
                    const float *rates, const float *p, double *moments, int S, int n, int first, int draws) {
    std::vector<float4> memory((bytes + 15) / 16);
    shared_memory = memory.data();
    run_blocks(blocks, [=] { dropped(x, keys, streams, rates, p, moments, S, n, first, draws); });
}
