// The CUDA kernel of `fused`: a block of threads holds one network and takes k steps of it.
//
// Weights and R rows of a batch lie in shared memory, Adam's moments in global memory, which the L2 cache holds.
// Batches above R rows go chunk by chunk: values before the second batch norm wait in `scratch`, all else is computed
// again. With inputs centred, the first batch norm needs no mean, and its backward pass nothing but
// G = sum over rows of x^T d. Constants given at compilation: N_INPUTS, N_UNITS, BATCH, NORMALIZED, EPSILON, THREADS,
// BLOCKS (of threads that share a processor).
//
// Three ways to share out a matrix of rows and units:
//   by units: two neighbouring threads hold one unit, each half of the rows (`row_of`: no two banks are hit at once);
//   by tiles: a warp computes all rows and 16 units of a product, a thread TILE x 4 values of it;
//   by blocks: a thread holds 10 x 4 values of the second weights' gradient, and updates these weights.

#ifdef __CUDACC__
#define SHARED(type, name) extern __shared__ type name[]
#define ROOT(r, v) asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v))
// Asked anew each time, so that what is computed from them takes no register meanwhile.
#define THREAD(t) asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t))
#define WAIT(cycles) for (long long start = clock64(); clock64() - start < (long long)(cycles););
#define NETWORK(s) asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(s))
#endif

constexpr int Q = N_INPUTS, H = N_UNITS, M = BATCH, T = THREADS, WARPS = T / 32;
constexpr int L = (H + 3) / 4 * 4;  // units with padding; what is padded is zero and stays so
constexpr int R = M < 32 ? M : 32, CHUNKS = M / R, TILE = R / 8;
constexpr int UNIFORMS = Q + 2 * H;
constexpr int LAST = Q * L, SHIFT = LAST + L, SCALE = SHIFT + 2 * L;  // where small parameters lie, W1 first
constexpr int BIAS = NORMALIZED ? SCALE + 2 * L : SCALE, SMALL = BIAS + 4;
constexpr int DOWN = 10, ACROSS = L / 4, HOLDERS = H / DOWN * ACROSS;  // blocks of W2's gradient, threads that hold one
constexpr int GRADIENTS = SMALL + Q * Q, ROWS = 2 * R * L > GRADIENTS ? 2 * R * L : (GRADIENTS + 3) / 4 * 4;
constexpr int DEEP = 5, WIDE = 4;  // turns of a loop that the compiler writes out
constexpr int PROCESSORS = 132, STEP_CYCLES = 7 * L * L;  // of an H200; of a step of R rows, about
constexpr int PRODUCTS = (Q * Q + T - 1) / T;  // elements of x^T x that a thread sums
constexpr float B1 = 0.9f, NEW1 = 0.1f, B2 = 0.999f, NEW2 = 0.001f, ADAM_EPSILON = 1e-8f;  // torch.optim.Adam
static_assert(M % R == 0 && R % 8 == 0 && H % DOWN == 0 && 2 * L <= T && HOLDERS <= T, "sizes");
static_assert(NORMALIZED || CHUNKS == 1, "the dropout family takes at most 32 rows");

struct Batches {  // of all networks, in global memory
    const float *x, *y, *uniform;  // (S, k M, Q), (S, k M), (., k M, UNIFORMS)
    float *waiting;                // (S, M, L)
    long long k;
};

struct Memory {  // shared
    float *w2, *small, *a, *z, *x, *error, *mean;  // (L, L), (SMALL,), (R, L) twice, (R, Q), (M,), (Q,)
    float *decay, *rate, *kept, *size, *root;      // of the network, of the step
    int *stream;
};

__device__ __forceinline__ Memory lay_out(float *memory) {
    Memory at;
    at.w2 = memory, at.small = at.w2 + L * L, at.a = at.small + SMALL, at.z = at.a + R * L;
    at.x = at.a + ROWS, at.error = at.x + R * Q, at.mean = at.error + M;
    at.decay = at.mean + Q, at.rate = at.decay + 1, at.kept = at.decay + 2, at.size = at.decay + 3;
    at.root = at.decay + 4, at.stream = (int *)(at.decay + 5);
    return at;
}

__device__ __forceinline__ float root(float v) {
    float r;
    ROOT(r, v);
    return r;
}

__device__ __forceinline__ int thread() {
    int t;
    THREAD(t);
    return t;
}

__device__ __forceinline__ long long network() {
    int s;
    NETWORK(s);
    return s;
}

// Rows of a step's batch.
__device__ __forceinline__ const float *inputs(const Batches &all, int step) {
    return all.x + (network() * all.k + step) * M * Q;
}
__device__ __forceinline__ const float *targets(const Batches &all, int step) {
    return all.y + (network() * all.k + step) * M;
}
__device__ __forceinline__ const float *uniforms(const Batches &all, int step, const Memory &at) {
    return all.uniform + (*at.stream * all.k + step) * M * UNIFORMS;
}
__device__ __forceinline__ float *waiting(const Batches &all) { return all.waiting + network() * M * L; }

struct Unit {  // that a thread and its neighbour hold
    int h, part;
    __device__ __forceinline__ Unit() {
        int t = thread();
        h = t / 2, part = t % 2;
    }
};

__device__ __forceinline__ int row_of(int i, int part) { return (i >> 2) * 8 + part * 4 + (i & 3); }

__device__ __forceinline__ float pair_sum(float v) { return v + __shfl_xor_sync(0xffffffffu, v, 1); }

__device__ __forceinline__ float warp_sum(float v) {
    for (int k = 16; k; k >>= 1) v += __shfl_xor_sync(0xffffffffu, v, k);
    return v;
}

// Bring a chunk of inputs: centred, or with inputs dropped.
__device__ __forceinline__ void load_inputs(const Batches &all, int step, const Memory &at, int chunk) {
    const float *x = inputs(all, step) + chunk * R * Q, *u = NORMALIZED ? nullptr : uniforms(all, step, at);
    for (int e = thread(); e < R * Q; e += T) {
        int r = e / Q, q = e % Q;
        at.x[e] = NORMALIZED ? x[e] - at.mean[q] : (u[r * UNIFORMS + q] >= *at.rate ? x[e] * *at.kept : 0.f);
    }
}

// Targets, to where errors will be, and what Adam corrects its moments by.
__device__ __forceinline__ void load_targets(const Batches &all, int step, const Memory &at, const float *corrections) {
    const float *y = targets(all, step);
    for (int r = thread(); r < M; r += T) at.error[r] = y[r];
    if (thread() == 0) *at.size = corrections[2 * step], *at.root = corrections[2 * step + 1];
}

// Means of the inputs over the batch.
__device__ __forceinline__ void input_means(const Batches &all, int step, const Memory &at) {
    const int t = thread(), lane = t % 32;
    const float *x = inputs(all, step);
    for (int q = t / 32; q < Q; q += WARPS) {
        float sum = 0.f;
        for (int r = lane; r < M; r += 32) sum += x[r * Q + q];
        sum = warp_sum(sum);
        if (lane == 0) at.mean[q] = sum / M;
    }
}

struct Column {  // of W1
    float w[Q];
    __device__ __forceinline__ Column(const Memory &at, int h) {
#pragma unroll
        for (int q = 0; q < Q; q++) w[q] = at.small[q * L + h];
    }
    __device__ __forceinline__ float times(const float *x) const {
        float z = 0.f;
#pragma unroll
        for (int q = 0; q < Q; q++) z += x[q] * w[q];
        return z;
    }
};

// Add to the squares of a unit's first-layer values, and to elements of x^T x.
__device__ __forceinline__ void first_squares(const Memory &at, float &squares,
                                              float (&products)[PRODUCTS]) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h < L) {
        Column column(at, h);
#pragma unroll WIDE
        for (int i = 0; i < R / 2; i++) {
            float z = column.times(at.x + row_of(i, part) * Q);
            at.a[row_of(i, part) * L + h] = z;
            squares += z * z;
        }
    }
#pragma unroll
    for (int e = 0; e < PRODUCTS; e++) {
        int own = thread() + e * T;
        if (own < Q * Q)
            for (int r = 0; r < R; r++) products[e] += at.x[r * Q + own / Q] * at.x[r * Q + own % Q];
    }
}

// Activations of the first layer, by units: from values that `first_squares` left, or computed again.
__device__ __forceinline__ void first_layer(const Batches &all, int step, const Memory &at, float inverse) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h >= L) return;
    Column column(at, h);
    float shift = at.small[SHIFT + h], scale = NORMALIZED ? at.small[SCALE + h] * inverse : 0.f;
    const float *u = NORMALIZED ? nullptr : uniforms(all, step, at) + Q + h;
#pragma unroll WIDE
    for (int i = 0; i < R / 2; i++) {
        int r = row_of(i, part);
        float *a = at.a + r * L + h;
        float z = NORMALIZED && CHUNKS == 1 ? *a : column.times(at.x + r * Q);
        if (NORMALIZED)
            *a = fmaxf(z * scale + shift, 0.f);
        else
            *a = h < H && u[r * UNIFORMS] >= *at.rate ? fmaxf(z + shift, 0.f) * *at.kept : 0.f;
    }
}

template <int N> __device__ __forceinline__ void clear(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = 0.f;
}
template <int N> __device__ __forceinline__ void clear(float (&values)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) clear(values[i]);
}

// a @ W2 into z, by tiles.
__device__ __forceinline__ void second_product(const Memory &at) {
    const int t = thread(), row = t % 8, h = t / 32 * 16 + t % 32 / 8 * 4;
    if (h >= L) return;
    float c[TILE][4] = {};
#pragma unroll DEEP
    for (int k = 0; k < L; k += 4) {
        float4 b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = *(const float4 *)(at.w2 + (k + j) * L + h);
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            float4 a = *(const float4 *)(at.a + (row + 8 * i) * L + k);
            c[i][0] += a.x * b[0].x, c[i][1] += a.x * b[0].y, c[i][2] += a.x * b[0].z, c[i][3] += a.x * b[0].w;
            c[i][0] += a.y * b[1].x, c[i][1] += a.y * b[1].y, c[i][2] += a.y * b[1].z, c[i][3] += a.y * b[1].w;
            c[i][0] += a.z * b[2].x, c[i][1] += a.z * b[2].y, c[i][2] += a.z * b[2].z, c[i][3] += a.z * b[2].w;
            c[i][0] += a.w * b[3].x, c[i][1] += a.w * b[3].y, c[i][2] += a.w * b[3].z, c[i][3] += a.w * b[3].w;
        }
    }
#pragma unroll
    for (int i = 0; i < TILE; i++)
        *(float4 *)(at.z + (row + 8 * i) * L + h) = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
}

// Where a thread's values of `back_product` lie.
__device__ __forceinline__ int back_place(int t, int i, int j) {
    return (t % 8 + 8 * i) * L + t / 32 * 16 + t % 32 / 8 + 4 * j;
}

// z @ W2^T, by tiles, through the first rectifier.
__device__ __forceinline__ void back_product(const Memory &at, float (&c)[TILE][4]) {
    const int t = thread(), row = t % 8, h = t / 32 * 16 + t % 32 / 8;
    clear(c);
    if (t / 32 * 16 >= L) return;
    int own[4];  // rows of W2; a tile at the edge has units beyond the last
#pragma unroll
    for (int j = 0; j < 4; j++) own[j] = (h + 4 * j < L ? h + 4 * j : h) * L;
#pragma unroll DEEP
    for (int k = 0; k < L; k += 4) {
        float4 b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = *(const float4 *)(at.w2 + own[j] + k);
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            float4 d = *(const float4 *)(at.z + (row + 8 * i) * L + k);
#pragma unroll
            for (int j = 0; j < 4; j++)
                c[i][j] += d.x * b[j].x, c[i][j] += d.y * b[j].y, c[i][j] += d.z * b[j].z, c[i][j] += d.w * b[j].w;
        }
    }
    const float kept = NORMALIZED ? 1.f : *at.kept;
#pragma unroll
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < 4; j++)
            c[i][j] = h + 4 * j < L && at.a[back_place(t, i, j)] > 0.f ? c[i][j] * kept : 0.f;
}

__device__ __forceinline__ void store_back(const Memory &at, const float (&c)[TILE][4]) {
    const int t = thread(), h = t / 32 * 16 + t % 32 / 8;
#pragma unroll
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < 4; j++)
            if (h + 4 * j < L) at.a[back_place(t, i, j)] = c[i][j];
}

// Add a^T z to the gradient of W2, by blocks.
__device__ __forceinline__ void add_outer(const Memory &at, float (&g)[DOWN][4]) {
    const int t = thread();
    if (t >= HOLDERS) return;
    const float *a = at.a + t / ACROSS * DOWN, *z = at.z + t % ACROSS * 4;
#pragma unroll 1  // more would spill
    for (int r = 0; r < R; r++, a += L, z += L) {
        float4 d = *(const float4 *)z;
#pragma unroll
        for (int i = 0; i < DOWN; i += 2) {
            float2 two = *(const float2 *)(a + i);
            g[i][0] += two.x * d.x, g[i][1] += two.x * d.y, g[i][2] += two.x * d.z, g[i][3] += two.x * d.w;
            g[i + 1][0] += two.y * d.x, g[i + 1][1] += two.y * d.y;
            g[i + 1][2] += two.y * d.z, g[i + 1][3] += two.y * d.w;
        }
    }
}

// Merge mean and squares of a chunk's values of a unit into those of `count` rows before (Chan et al. 1983).
__device__ __forceinline__ void merge_statistics(const Batches &all, const Memory &at, int chunk, float &mean,
                                                 float &squares) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h >= L) return;
    constexpr int own = R / 2;
    float sum = 0.f, own_squares = 0.f, *waits = CHUNKS > 1 ? waiting(all) + chunk * R * L + h : nullptr;
#pragma unroll WIDE
    for (int i = 0; i < own; i++) {
        float z = at.z[row_of(i, part) * L + h];
        sum += z;
        if (CHUNKS > 1) waits[row_of(i, part) * L] = z;
    }
    float own_mean = sum / own, delta = own_mean - mean;
#pragma unroll WIDE
    for (int i = 0; i < own; i++) {
        float z = at.z[row_of(i, part) * L + h] - own_mean;
        own_squares += z * z;
    }
    squares += own_squares + delta * delta * (float(chunk) * own / (chunk + 1));
    mean += delta / (chunk + 1);
}

// Normalise the second layer, or drop its units, by units.
__device__ __forceinline__ void second_layer(const Batches &all, int step, const Memory &at, int chunk, float mean,
                                             float inverse) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h >= L) return;
    const float *waits = CHUNKS > 1 ? waiting(all) + chunk * R * L + h : nullptr, shift = at.small[SHIFT + L + h];
    const float *u = NORMALIZED ? nullptr : uniforms(all, step, at) + Q + H + h;
#pragma unroll
    for (int i = 0; i < R / 2; i++) {
        int r = row_of(i, part);
        float *z = at.z + r * L + h;
        if (NORMALIZED)
            *z = ((CHUNKS > 1 ? waits[r * L] : *z) - mean) * inverse;
        else
            *z = h < H && u[r * UNIFORMS] >= *at.rate ? fmaxf(*z + shift, 0.f) * *at.kept : 0.f;
    }
}

__device__ __forceinline__ float activation(const Memory &at, float z, int h) {
    return NORMALIZED ? fmaxf(z * at.small[SCALE + L + h] + at.small[SHIFT + L + h], 0.f) : z;
}

// (f(x) - y) / M of a chunk, a row a warp.
__device__ __forceinline__ void errors(const Memory &at, int chunk) {
    const int t = thread(), lane = t % 32;
    for (int r = t / 32; r < R; r += WARPS) {
        float f = 0.f;
        for (int h = lane; h < L; h += 32) f += activation(at, at.z[r * L + h], h) * at.small[LAST + h];
        f = warp_sum(f);
        float *error = at.error + chunk * R + r;  // where y waits
        if (lane == 0) *error = (f + at.small[BIAS] - *error) / M;
    }
}

// Add to a unit's sums over rows with an open rectifier: errors, errors times z, errors times activation.
__device__ __forceinline__ void second_sums(const Memory &at, int chunk, float &shift, float &scale,
                                            float &last) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h >= L) return;
#pragma unroll WIDE
    for (int i = 0; i < R / 2; i++) {
        int r = row_of(i, part);
        float z = at.z[r * L + h], a = activation(at, z, h), e = a > 0.f ? at.error[chunk * R + r] : 0.f;
        shift += e;
        scale += e * z;
        last += e * a;
    }
}

// Replace z by the derivative of the loss by the second layer's products, by units.
__device__ __forceinline__ void second_back(const Memory &at, int chunk, float inverse, float d_shift, float d_scale) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h >= L) return;
    float last = at.small[LAST + h] * (NORMALIZED ? 1.f : *at.kept);
    float factor = NORMALIZED ? at.small[SCALE + L + h] * inverse : 1.f;
#pragma unroll WIDE
    for (int i = 0; i < R / 2; i++) {
        int r = row_of(i, part);
        float z = at.z[r * L + h], d = activation(at, z, h) > 0.f ? at.error[chunk * R + r] * last : 0.f;
        at.z[r * L + h] = NORMALIZED ? factor * (d - d_shift / M - z * (d_scale / M)) : d;
    }
}

// Add to G = x^T d of a unit and to the sum of d.
__device__ __forceinline__ void first_sums(const Memory &at, float (&G)[Q], float &shift) {
    Unit unit;
    const int h = unit.h, part = unit.part;
    if (h >= L) return;
#pragma unroll WIDE
    for (int i = 0; i < R / 2; i++) {
        int r = row_of(i, part);
        float d = at.a[r * L + h];
        shift += d;
#pragma unroll
        for (int q = 0; q < Q; q++) G[q] += at.x[r * Q + q] * d;
    }
}

__device__ __forceinline__ void adam(float &p, float &m, float &v, float g, float size, float correction) {
    m = B1 * m + NEW1 * g;
    v = B2 * v + NEW2 * g * g;
    p -= __fdividef(size * m, root(v) * correction + ADAM_EPSILON);
}

__device__ __forceinline__ void update_small(const Memory &at, const float *g, float *m, float *v) {
    const float decay = *at.decay, size = *at.size, correction = *at.root;
    for (int e = thread(); e < SMALL; e += T) {
        float own = at.small[e];
        adam(at.small[e], m[e], v[e], g[e] + (e < SHIFT ? decay * own : 0.f), size, correction);
    }
}

__device__ __forceinline__ void update_second(const Memory &at, const float (&g)[DOWN][4], float *m, float *v) {
    const int t = thread();
    if (t >= HOLDERS) return;
    const float decay = *at.decay, size = *at.size, correction = *at.root;
    const int first = t / ACROSS * DOWN * L + t % ACROSS * 4;
#pragma unroll
    for (int i = 0; i < DOWN; i++) {
        int e = first + i * L;
        float4 p4 = *(float4 *)(at.w2 + e), m4 = *(float4 *)(m + e), v4 = *(float4 *)(v + e);
        adam(p4.x, m4.x, v4.x, g[i][0] + decay * p4.x, size, correction);
        adam(p4.y, m4.y, v4.y, g[i][1] + decay * p4.y, size, correction);
        adam(p4.z, m4.z, v4.z, g[i][2] + decay * p4.z, size, correction);
        adam(p4.w, m4.w, v4.w, g[i][3] + decay * p4.w, size, correction);
        *(float4 *)(at.w2 + e) = p4, *(float4 *)(m + e) = m4, *(float4 *)(v + e) = v4;
    }
}

// Gradients of the small parameters, from sums over rows.
__device__ __forceinline__ void small_gradients(const Memory &at, float *g, const float *products, const float (&G)[Q],
                                                float inverse, float d_shift1, float d_shift2, float d_scale2,
                                                float d_last) {
    Unit unit;
    const int h = unit.h, t = thread();
    if (h < L && unit.part == 0) {
        Column column(at, h);
        float d_scale = NORMALIZED ? inverse * column.times(G) : 0.f;
        float factor = NORMALIZED ? at.small[SCALE + h] * inverse : 1.f;
#pragma unroll
        for (int q = 0; q < Q; q++) {
            float along = NORMALIZED ? inverse * column.times(products + q * Q) : 0.f;  // x times normalised values
            g[q * L + h] = factor * (G[q] - along * (d_scale / M));
        }
        g[LAST + h] = d_last, g[SHIFT + h] = d_shift1, g[SHIFT + L + h] = d_shift2;
        if (NORMALIZED) g[SCALE + h] = d_scale, g[SCALE + L + h] = d_scale2;
    }
    if (t / 32 == WARPS - 1) {
        float sum = 0.f;
        for (int r = t % 32; r < M; r += 32) sum += at.error[r];
        sum = warp_sum(sum);
        if (t % 32 < 4) g[BIAS + t % 32] = t % 32 == 0 ? sum : 0.f;
    }
}

// Blocks that share a processor start a third of a step apart, processors a little: memory serves one while others
// compute.
__device__ __forceinline__ void stagger() {
    const int s = network();
    WAIT((s / PROCESSORS + s % PROCESSORS / float(PROCESSORS)) / BLOCKS * STEP_CYCLES * CHUNKS);
}

// Bring parameters, and what stays the same over steps.
__device__ __forceinline__ void load_network(const Memory &at, const float *p, const float *decays, const float *rates,
                                             const long long *streams) {
    const float *own = p + network() * (SMALL + H * L);
    for (int e = thread(); e < SMALL; e += T) at.small[e] = own[e];
    for (int e = thread(); e < L * L; e += T) at.w2[e] = e < H * L ? own[SMALL + e] : 0.f;
    if (thread() == 0) {
        *at.decay = decays[network()], *at.rate = rates[network()], *at.stream = streams[network()];
        *at.kept = NORMALIZED ? 1.f : 1.f / (1.f - *at.rate);
    }
}

__device__ __forceinline__ void store_network(const Memory &at, float *p) {
    float *own = p + network() * (SMALL + H * L);
    for (int e = thread(); e < SMALL; e += T) own[e] = at.small[e];
    for (int e = thread(); e < H * L; e += T) own[SMALL + e] = at.w2[e];
}

// 1 / standard deviation of the first layer's values, of this thread's unit; a thread's elements of x^T x.
__device__ __forceinline__ float first_statistics(const Batches &all, int step, const Memory &at,
                                                  float (&products)[PRODUCTS]) {
    float squares = 0.f;
    input_means(all, step, at);
    __syncthreads();
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        load_inputs(all, step, at, chunk);
        __syncthreads();
        first_squares(at, squares, products);
        if (CHUNKS > 1) __syncthreads();
    }
    return 1.f / sqrtf(pair_sum(squares) / M + EPSILON);
}

// The second layer's products, their mean and 1 / standard deviation.
__device__ __forceinline__ void second_statistics(const Batches &all, int step, const Memory &at, float inverse1,
                                                  float &mean, float &inverse) {
    float squares = 0.f;
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (!NORMALIZED || CHUNKS > 1) {
            load_inputs(all, step, at, chunk);
            __syncthreads();
        }
        first_layer(all, step, at, inverse1);
        __syncthreads();
        second_product(at);
        __syncthreads();
        if (NORMALIZED) merge_statistics(all, at, chunk, mean, squares);
    }
    if (NORMALIZED) {  // both halves of the rows
        float other = __shfl_xor_sync(0xffffffffu, mean, 1), delta = other - mean;
        inverse = 1.f / sqrtf((pair_sum(squares) + delta * delta * (M / 4.f)) / M + EPSILON);
        mean = (mean + other) / 2.f;
    }
}

// A chunk's rows as the backward pass needs them: activations of the first layer in a, derivatives of the second in z.
__device__ __forceinline__ void bring_back(const Batches &all, int step, const Memory &at, int chunk, float inverse1,
                                           float mean2, float inverse2, float d_shift2, float d_scale2) {
    __syncthreads();  // the chunk before is done with
    load_inputs(all, step, at, chunk);
    second_layer(all, step, at, chunk, mean2, inverse2);
    second_back(at, chunk, inverse2, d_shift2, d_scale2);
    __syncthreads();
    first_layer(all, step, at, inverse1);
    __syncthreads();
}

// x (S, k M, Q), y (S, k M), uniform (., k M, UNIFORMS) by stream; streams, rates, decays (S,); corrections (k, 2);
// scratch (S, M L) where batches have chunks; p, m, v (S, SMALL + H L): small parameters, then W2.
extern "C" __global__ void __launch_bounds__(T, BLOCKS)
    fused(const float *x, const float *y, const float *uniform, const long long *streams, const float *rates,
          const float *decays, const float *corrections, float *scratch, float *p, float *m, float *v, int k) {
    SHARED(float4, memory);
    const Batches all = {x, y, uniform, scratch, k};
    const Memory at = lay_out((float *)memory);
    load_network(at, p, decays, rates, streams);
    stagger();
    __syncthreads();

    for (int step = 0; step < k; step++) {
        load_targets(all, step, at, corrections);
        float products[PRODUCTS] = {}, inverse1 = NORMALIZED ? first_statistics(all, step, at, products) : 1.f;
        float mean2 = 0.f, inverse2 = 1.f;
        second_statistics(all, step, at, inverse1, mean2, inverse2);

        float d_shift2 = 0.f, d_scale2 = 0.f, d_last = 0.f;
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            second_layer(all, step, at, chunk, mean2, inverse2);
            __syncthreads();
            errors(at, chunk);
            __syncthreads();
            second_sums(at, chunk, d_shift2, d_scale2, d_last);
        }
        const float last = at.small[LAST + thread() / 2 % L] * (NORMALIZED ? 1.f : *at.kept);
        d_shift2 = pair_sum(d_shift2) * last, d_scale2 = pair_sum(d_scale2) * last, d_last = pair_sum(d_last);

        float G[Q], d_shift1 = 0.f, gradient[DOWN][4], back[TILE][4];
        if (CHUNKS == 1) {
            second_back(at, 0, inverse2, d_shift2, d_scale2);
            __syncthreads();
            back_product(at, back);
            clear(gradient);
            add_outer(at, gradient);
            __syncthreads();
            store_back(at, back);
            __syncthreads();
            clear(G);
            first_sums(at, G, d_shift1);
        } else {
            clear(G);
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                bring_back(all, step, at, chunk, inverse1, mean2, inverse2, d_shift2, d_scale2);
                back_product(at, back);
                store_back(at, back);
                __syncthreads();
                first_sums(at, G, d_shift1);
            }
            clear(gradient);  // apart from the loop above: registers do not hold both
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                bring_back(all, step, at, chunk, inverse1, mean2, inverse2, d_shift2, d_scale2);
                add_outer(at, gradient);
            }
        }

#pragma unroll
        for (int q = 0; q < Q; q++) G[q] = pair_sum(G[q]);
        d_shift1 = pair_sum(d_shift1);
        __syncthreads();  // rows are done with: gradients of small parameters take their place
        float *g = at.a, *all_products = at.a + SMALL;
#pragma unroll
        for (int e = 0; e < PRODUCTS; e++)
            if (thread() + e * T < Q * Q) all_products[thread() + e * T] = products[e];
        __syncthreads();
        small_gradients(at, g, all_products, G, inverse1, d_shift1, d_shift2, d_scale2, d_last);
        __syncthreads();
        const long long own = network() * (SMALL + H * L);
        update_small(at, g, m + own, v + own);
        update_second(at, gradient, m + own + SMALL, v + own + SMALL);
        __syncthreads();
    }
    store_network(at, p);
}
