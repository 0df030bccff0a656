// The CUDA kernel of `narrow`: f(scale (x * weight) + shift + shortcut) over channels-last images, products as TF32.
//
// A block of threads computes PIXELS pixels, rows of one image or several whole images, and all D outputs of them.
// 16 input channels at a time lie in shared memory, with the border that the pixels need, the next 16 on their way.
// A warp multiplies TILES tiles of 16 pixels by weights that lie in memory as its threads hold them (`narrow.packed`):
// thread (g, t) = (lane / 4, lane % 4) takes channels 4 t to 4 t + 3 of pixels g and g + 8, and gives outputs 4 t to
// 4 t + 3 of them.
// Constants given at compilation: INPUTS, OUTPUTS, HEIGHT, WIDTH, HIGH and WIDE (of the result), SIZE, STRIDE, PADDING,
// PIXELS, WARPS, SHORTCUT.

#ifdef __CUDACC__
__device__ __forceinline__ void copy(float4 *to, const float *from, bool inside) {  // zeros if outside
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }

template <int LATER>  // waits for all copies but those of so many groups
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
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
constexpr int ROWS = PIXELS / WIDE < HIGH ? PIXELS / WIDE : HIGH, IMAGES = PIXELS / (ROWS * WIDE);  // of a block
constexpr int STRIPS = HIGH / ROWS;                                                                 // of an image
constexpr int DEEP = (ROWS - 1) * STRIDE + SIZE, ACROSS = (WIDE - 1) * STRIDE + SIZE, AROUND = DEEP * ACROSS;
constexpr int TILES = PIXELS / 16 / WARPS, PARTS = D / 8, GROUPS = C / 16, BUFFERS = GROUPS > 1 ? 2 : 1;
static_assert(ROWS * WIDE * IMAGES == PIXELS && STRIPS * ROWS == HIGH && TILES * 16 * WARPS == PIXELS, "sizes");

// Call visit(line, i) for each quarter i of 16 channels, along a line with its border, that this thread copies.
template <class Visit>
__device__ __forceinline__ void each_place(Visit visit) {
    for (int line = threadIdx.x / 32; line < IMAGES * DEEP; line += WARPS)
#pragma unroll
        for (int i = threadIdx.x % 32; i < ACROSS * 4; i += 32) visit(line, i);
}

__device__ __forceinline__ void copy_group(float4 *seen, const float *x, int first, int top, int n) {
    each_place([=](int line, int i) {
        int image = first + line / DEEP, row = top * STRIDE - PADDING + line % DEEP, column = i / 4 - PADDING;
        bool inside = image < n && row >= 0 && row < H && column >= 0 && column < W;
        const float *from = x + (((long long)image * H + row) * W + column) * C + i % 4 * 4;
        copy(seen + line * ACROSS * 4 + i, inside ? from : x, inside);
    });
    end_of_copies();
}

__device__ __forceinline__ void round_own(float4 *seen) {
    each_place([=](int line, int i) {
        float4 &v = seen[line * ACROSS * 4 + i];
        v = make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
    });
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

// x (n, H, W, C), weight as packed, scale and shift (n / images, D), shortcut and out (n, HIGH, WIDE, D)
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    narrow(const float *__restrict__ x, const float4 *__restrict__ weight, const float *__restrict__ scale,
           const float *__restrict__ shift, const float *__restrict__ shortcut, float *__restrict__ out, int n,
           int images, double slope) {
    __shared__ float4 seen[BUFFERS][IMAGES * AROUND * 4];
    const int first = blockIdx.x / STRIPS * IMAGES, top = blockIdx.x % STRIPS * ROWS;
    const int t = threadIdx.x % 4, start = threadIdx.x / 32 * TILES * 16 + threadIdx.x % 32 / 4;
    int at[2 * TILES];  // of pixel start + 8 i
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int pixel = start + 8 * i, row = pixel / (ROWS * WIDE) * DEEP + pixel / WIDE % ROWS * STRIDE;
        at[i] = (row * ACROSS + pixel % WIDE * STRIDE) * 4 + t;
    }
    float sum[TILES][PARTS][4] = {};
    copy_group(seen[0], x, first, top, n);
    for (int group = 0; group < GROUPS; group++) {
        float4 *here = seen[group % BUFFERS];
        if (group + 1 < GROUPS) {  // comes while this one is multiplied
            copy_group(seen[(group + 1) % BUFFERS], x + 16 * (group + 1), first, top, n);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        round_own(here);
        __syncthreads();
        multiply_group(sum, here, weight + group * SIZE * SIZE * PARTS * 32, at);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int pixel = start + 8 * i, image = first + pixel / (ROWS * WIDE);
        if (image >= n) continue;
        long long place = ((long long)image * HIGH + top + pixel / WIDE % ROWS) * WIDE + pixel % WIDE;
#pragma unroll
        for (int part = 0; part < PARTS; part += 2) {
            int output = 8 * part + 4 * t;
            const float *own = scale + image / images * D + output, *beside = shift + image / images * D + output;
            float4 other = make_float4(0, 0, 0, 0);
            if (SHORTCUT) other = *(const float4 *)(shortcut + place * D + output);
            *(float4 *)(out + place * D + output) =
                finish(sum[i / 2][part] + i % 2 * 2, sum[i / 2][part + 1] + i % 2 * 2, *(const float4 *)own,
                       *(const float4 *)beside, other, (float)slope);
        }
    }
}
