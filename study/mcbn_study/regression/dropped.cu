// The CUDA kernel of `dropped_moments`: mean and variance over draws of what networks with dropout say of rows of inputs.
//
// A thread holds a row of a network: activations of its first layer lie in registers; weights lie in shared memory,
// where all threads read the same one at a time. A mask is hashed where it is needed, as `problem.uniforms` does.
// As operations of their own, masks and activations of every draw go through memory a dozen times.
// Constants given at compilation: N_INPUTS, N_UNITS, THREADS.

#ifdef __CUDACC__
#define SHARED(type, name) extern __shared__ type name[]
#endif

constexpr int Q = N_INPUTS, H = N_UNITS, L = (H + 3) / 4 * 4, T = THREADS;
constexpr int LAST = Q * L, SHIFT = LAST + L, BIAS = SHIFT + 2 * L, SECOND = BIAS + 4, WHOLE = SECOND + H * L;

// The mask of unit `at`: SplitMix64 (Steele et al. 2014) at any position without the ones before.
__device__ __forceinline__ bool keeps(unsigned long long key, unsigned long long at, float rate) {
    unsigned long long z = key + (at + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (float)(unsigned)((z ^ z >> 31) >> 40) * 0x1p-24f >= rate;
}

// x (R, n, Q), keys (R,) of streams; streams, rates (S,); p (S, WHOLE) as `_pack` lays it out; moments (2, S, n).
extern "C" __global__ void __launch_bounds__(T, H > 50 ? 3 : 4)
    dropped(const float *x, const long long *keys, const long long *streams, const float *rates, const float *p,
            double *moments, int S, int n, int first, int draws) {
    SHARED(float4, memory);
    float *w = (float *)memory;
    const int blocks = (n + T - 1) / T, row = blockIdx.x % blocks * T + threadIdx.x;
    const long long s = blockIdx.x / blocks;
    const float rate = rates[s], scale = 1.f / (1.f - rate);
    for (int e = threadIdx.x; e < WHOLE; e += T)  // biases are added to what is scaled
        w[e] = p[s * WHOLE + e] * (e < SHIFT || e >= SECOND ? scale : 1.f);
    __syncthreads();
    if (row >= n) return;

    const unsigned long long key = keys[streams[s]];
    float own[Q];
#pragma unroll
    for (int q = 0; q < Q; q++) own[q] = x[(streams[s] * n + row) * Q + q];
    double sum = 0, squares = 0;
    for (int t = 0; t < draws; t++) {
        asm volatile("" ::: "memory");  // or the compiler would keep weights in registers over draws, too many of them
        const unsigned long long at = ((unsigned long long)(first + t) << 32) + ((unsigned long long)row << 10);
        float in[Q], a[H], f = w[BIAS];
#pragma unroll
        for (int q = 0; q < Q; q++) in[q] = keeps(key, at + q, rate) ? own[q] : 0.f;
#pragma unroll
        for (int h = 0; h < H; h++) {
            float z = w[SHIFT + h];
#pragma unroll
            for (int q = 0; q < Q; q++) z += in[q] * w[q * L + h];
            a[h] = keeps(key, at + Q + h, rate) ? fmaxf(z, 0.f) : 0.f;
        }
#pragma unroll 1
        for (int h = 0; h < L; h += 4) {
            const float4 bias = *(const float4 *)(w + SHIFT + L + h), last = *(const float4 *)(w + LAST + h);
            float4 z = bias;
#pragma unroll
            for (int k = 0; k < H; k++) {
                const float4 b = *(const float4 *)(w + SECOND + k * L + h);
                z.x += a[k] * b.x, z.y += a[k] * b.y, z.z += a[k] * b.z, z.w += a[k] * b.w;
            }
            const unsigned long long unit = at + Q + H + h;  // those beyond the last have a weight of 0
            f += keeps(key, unit, rate) ? fmaxf(z.x, 0.f) * last.x : 0.f;
            f += keeps(key, unit + 1, rate) ? fmaxf(z.y, 0.f) * last.y : 0.f;
            f += keeps(key, unit + 2, rate) ? fmaxf(z.z, 0.f) * last.z : 0.f;
            f += keeps(key, unit + 3, rate) ? fmaxf(z.w, 0.f) * last.w : 0.f;
        }
        sum += f, squares += (double)f * f;
    }
    const double mean = sum / draws, variance = squares / draws - mean * mean;
    moments[s * n + row] = mean, moments[(S + s) * n + row] = variance > 0 ? variance : 0;
}
