// The CUDA kernel of `narrow`: f(scale (x * weight) + shift + shortcut) over channels-last images, products as TF32.
// cuDNN's float32 convolutions of 16 channels take five times what moving their values takes, and batch norm that differs
// from draw to draw is two passes over memory more.
//
// A block of threads computes a patch of ROWS x COLUMNS pixels of IMAGES images, and all D outputs of them.
// 16 input channels at a time lie in shared memory, with the border that the pixels need, the next 16 on their way.
// A warp multiplies TILES tiles of 16 pixels by weights that lie in memory as its threads hold them (`narrow.packed`):
// thread (g, t) = (lane / 4, lane % 4) takes channels 4 t to 4 t + 3 of pixels g and g + 8, and gives outputs 4 t to
// 4 t + 3 of them.
// Constants given at compilation: INPUTS, OUTPUTS (a multiple of 16, of which the first KEPT are wanted), HEIGHT, WIDTH,
// HIGH and WIDE (of the result), SIZE, STRIDE, PADDING, ROWS, COLUMNS, IMAGES, WARPS, BLOCKS (that a multiprocessor
// should hold), SHORTCUT; FIRST, the channels that x has, the others are those of `beside`; DOUBLED, 1 if x is half as
// high and wide and every pixel stands for four, 2 if `beside` is, 3 if both are.

// What the compiler must not move past copies is said by "memory": without it, results were wrong for some sizes.

#ifdef __CUDACC__
__device__ __forceinline__ void copy(float4 *to, const float *from, bool inside) {  // zeros if outside
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void write(float *to, float4 v) {  // at once: the compiler would take four turns
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

__device__ __forceinline__ float rounded(float value) {  // to TF32; multiplication alone would cut digits off
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return __uint_as_float(bits);
}

// sum (16 pixels, 8 outputs) += a (16, 8) b (8, 8), each spread over the threads of a warp.
__device__ __forceinline__ void multiply(float (&sum)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
#endif

constexpr int C = INPUTS, D = OUTPUTS, H = HEIGHT, W = WIDTH;
constexpr int DOWN = (HIGH + ROWS - 1) / ROWS, ALONG = (WIDE + COLUMNS - 1) / COLUMNS;  // patches of an image
constexpr int DEEP = (ROWS - 1) * STRIDE + SIZE, ACROSS = (COLUMNS - 1) * STRIDE + SIZE, AROUND = DEEP * ACROSS;
constexpr int PATCH = ROWS * COLUMNS, TILES = IMAGES * PATCH / 16 / WARPS, PARTS = D / 8;
constexpr int GROUPS = C / 16, BUFFERS = GROUPS > 1 ? 2 : 1;
static_assert(TILES * 16 * WARPS == IMAGES * PATCH && FIRST % 16 == 0 && C % 16 == 0, "sizes");

// Quarters of 16 channels, all around a block's pixels, that it copies, and of them each thread.
constexpr int QUARTERS = IMAGES * AROUND * 4, THREADS_OF_BLOCK = 32 * WARPS;
constexpr int COPIES = (QUARTERS + THREADS_OF_BLOCK - 1) / THREADS_OF_BLOCK;

// Where the pixels lie that this thread copies, in images of H / 2^half by W / 2^half; -1 outside of them.
__device__ __forceinline__ void find_places(int (&places)[COPIES], int half, int first, int top, int left, int n) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        int pixel = (threadIdx.x + i * THREADS_OF_BLOCK) / 4, line = pixel / ACROSS, image = first + line / DEEP;
        int row = top * STRIDE - PADDING + line % DEEP, column = left * STRIDE - PADDING + pixel % ACROSS;
        bool inside = image < n && row >= 0 && row < H && column >= 0 && column < W;
        places[i] = inside ? (image * (H >> half) + (row >> half)) * (W >> half) + (column >> half) : -1;
    }
}

__device__ __forceinline__ void copy_group(float4 *seen, const float *source, int channels,
                                           const int (&places)[COPIES]) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        int quarter = threadIdx.x + i * THREADS_OF_BLOCK;
        const float *from = source + (long long)places[i] * channels + quarter % 4 * 4;
        if (quarter < QUARTERS) copy(seen + quarter, places[i] < 0 ? source : from, places[i] >= 0);
    }
    end_of_copies();
}

__device__ __forceinline__ void round_own(float4 *seen) {
#pragma unroll
    for (int i = threadIdx.x; i < QUARTERS; i += THREADS_OF_BLOCK)
        seen[i] = make_float4(rounded(seen[i].x), rounded(seen[i].y), rounded(seen[i].z), rounded(seen[i].w));
}

// Four of the KEPT numbers at `from`, the first of them number i.
__device__ __forceinline__ float4 load(const float *from, int i) {
    if (KEPT % 4 == 0) return i < KEPT ? *(const float4 *)(from + i) : make_float4(0, 0, 0, 0);
    return make_float4(i < KEPT ? from[i] : 0, i + 1 < KEPT ? from[i + 1] : 0, i + 2 < KEPT ? from[i + 2] : 0,
                       i + 3 < KEPT ? from[i + 3] : 0);
}

__device__ __forceinline__ void store(float *to, int i, float4 value) {
    if (KEPT % 4 == 0) {
        if (i < KEPT) write(to + i, value);
        return;
    }
    if (i < KEPT) to[i] = value.x;
    if (i + 1 < KEPT) to[i + 1] = value.y;
    if (i + 2 < KEPT) to[i + 2] = value.z;
    if (i + 3 < KEPT) to[i + 3] = value.w;
}

__device__ __forceinline__ float4 finish(const float *sum, const float *next, float4 scale, float4 shift, float4 other,
                                         float slope) {
    float y[4] = {sum[0] * scale.x + shift.x + other.x, sum[1] * scale.y + shift.y + other.y,
                  next[0] * scale.z + shift.z + other.z, next[1] * scale.w + shift.w + other.w};
    for (float &value : y)
        if (!(value > 0)) value = slope == 0 && value < 0 ? 0 : slope * value;  // of -infinity too, NaN stays
    return make_float4(y[0], y[1], y[2], y[3]);
}

// sum += the products of 16 channels of this warp's pixels; `at` is where a pixel's first tap lies.
__device__ __forceinline__ void multiply_group(float (&sum)[TILES][PARTS][4], const float4 *seen, const float4 *weight,
                                               const int (&at)[2 * TILES]) {
#pragma unroll
    for (int tap = 0; tap < SIZE * SIZE; tap++) {
        float4 w[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++) w[part] = weight[(tap * PARTS + part) * 32 + threadIdx.x % 32];
        int away = (tap / SIZE * ACROSS + tap % SIZE) * 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float4 a = seen[at[2 * tile] + away], b = seen[at[2 * tile + 1] + away];
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                multiply(sum[tile][part], a.x, b.x, a.y, b.y, w[part].x, w[part].y);
                multiply(sum[tile][part], a.z, b.z, a.w, b.w, w[part].z, w[part].w);
            }
        }
    }
}

// x (n, H, W, FIRST), beside (n, H, W, C - FIRST), weight as packed, scale and shift (n / images, KEPT) in rows of
// `pitch`, shortcut and out (n, HIGH, WIDE, KEPT)
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    narrow(const float *__restrict__ x, const float *__restrict__ beside, const float4 *__restrict__ weight,
           const float *__restrict__ scale, const float *__restrict__ shift, const float *__restrict__ shortcut,
           float *__restrict__ out, int n, int images, int pitch, double slope) {
    __shared__ float4 seen[BUFFERS][IMAGES * AROUND * 4];
    const int first = blockIdx.x / (DOWN * ALONG) * IMAGES;
    const int top = blockIdx.x / ALONG % DOWN * ROWS, left = blockIdx.x % ALONG * COLUMNS;
    const int t = threadIdx.x % 4, start = threadIdx.x / 32 * TILES * 16 + threadIdx.x % 32 / 4;
    int at[2 * TILES];  // of pixel start + 8 i
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int pixel = start + 8 * i, row = pixel / PATCH * DEEP + pixel / COLUMNS % ROWS * STRIDE;
        at[i] = (row * ACROSS + pixel % COLUMNS * STRIDE) * 4 + t;
    }
    float sum[TILES][PARTS][4] = {};
    int places[COPIES];
    find_places(places, DOUBLED & 1, first, top, left, n);
    copy_group(seen[0], x, FIRST, places);
    for (int group = 0; group < GROUPS; group++) {
        float4 *here = seen[group % BUFFERS];
        wait_for_copies();
        round_own(here);
        __syncthreads();
        int later = 16 * (group + 1);  // channels that come while these are multiplied
        if (later == FIRST && FIRST < C && DOUBLED % 3) find_places(places, DOUBLED >> 1, first, top, left, n);
        if (later < FIRST)
            copy_group(seen[(group + 1) % BUFFERS], x + later, FIRST, places);
        else if (later < C)
            copy_group(seen[(group + 1) % BUFFERS], beside + later - FIRST, C - FIRST, places);
        multiply_group(sum, here, weight + group * SIZE * SIZE * PARTS * 32, at);
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int pixel = start + 8 * i, image = first + pixel / PATCH;
        int row = top + pixel / COLUMNS % ROWS, column = left + pixel % COLUMNS;
        if (image >= n || row >= HIGH || column >= WIDE) continue;
        long long place = ((long long)image * HIGH + row) * WIDE + column;
#pragma unroll
        for (int part = 0; part < PARTS; part += 2) {
            int output = 8 * part + 4 * t;
            float4 other = SHORTCUT ? load(shortcut + place * KEPT, output) : make_float4(0, 0, 0, 0);
            float4 factor = load(scale + image / images * pitch, output);
            float4 added = load(shift + image / images * pitch, output);
            store(out + place * KEPT, output,
                  finish(sum[i / 2][part] + i % 2 * 2, sum[i / 2][part + 1] + i % 2 * 2, factor, added, other,
                         (float)slope));
        }
    }
}
