// The kernel of `mcbn.kernels.narrow` on the host, products in float32.

#include "cuda_on_host.h"

static float factors[THREADS][6];

static void copy(float4 *to, const float *from, bool inside) {
    *to = inside ? *(const float4 *)from : make_float4(0, 0, 0, 0);
}
static void end_of_copies() {}
static void wait_for_copies() {}
static void write(float *to, float4 value) { *(float4 *)to = value; }
static float rounded(float value) { return value; }
static void multiply(float (&sum)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    auto &warp = *warps[threadIdx.x / 32];
    float mine[6] = {a0, a1, a2, a3, b0, b1};
    std::copy(mine, mine + 6, factors[threadIdx.x]);
    warp.arrive_and_wait();
    auto of = factors + threadIdx.x / 32 * 32;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++)  // pixel g + 8 (i / 2), output 2 t + i % 2
        for (int k = 0; k < 8; k++) sum[i] += of[4 * g + k % 4][i / 2 + k / 4 * 2] * of[4 * (2 * t + i % 2) + k % 4][4 + k / 4];
    warp.arrive_and_wait();
}

#include KERNEL

extern "C" void run(int blocks, const float *x, const float *beside, const float4 *weight, const float *scale,
                    const float *shift, const float *shortcut, float *out, int n, int images, int pitch,
                    double slope) {
    run_blocks(blocks, [=] { narrow(x, beside, weight, scale, shift, shortcut, out, n, images, pitch, slope); });
}
