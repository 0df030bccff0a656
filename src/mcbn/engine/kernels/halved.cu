// The CUDA kernel of `halved`: the largest of 2 x 2 pixels, over channels-last images.
// PyTorch's pooling also writes where each was, which takes longer than the rest.
//
// A thread takes 4 channels of one pixel of the result. Constants given at compilation: CHANNELS, WIDTH (of x).

constexpr int QUADS = CHANNELS / 4;

__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }  // NaN stays

__device__ __forceinline__ float4 larger(float4 a, float4 b) {
    return make_float4(larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w));
}

// x (n, 2 h, WIDTH, CHANNELS), out (n, h, WIDTH / 2, CHANNELS), of which `count` fours; h rows of an image follow those of
// the last one, so that row r of the result is of rows 2 r and 2 r + 1, whatever the image
extern "C" __global__ void halved(const float4 *__restrict__ x, float4 *__restrict__ out, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int pixel = i / QUADS, row = pixel / (WIDTH / 2), column = pixel % (WIDTH / 2);
    const float4 *from = x + ((long long)row * 2 * WIDTH + column * 2) * QUADS + i % QUADS;
    out[i] = larger(larger(from[0], from[QUADS]), larger(from[WIDTH * QUADS], from[(WIDTH + 1) * QUADS]));
}
