// The CUDA kernel of `scaled`: f(scale x + shift + shortcut) over channels-last images, rounded where the network rounds:
// behind the batch norm, behind the sum and behind the rectifier.
// PyTorch goes six times over memory for it in half precision.
//
// A thread takes 16 bytes of the result: 8 channels of half precision, or 4 of single precision, of one pixel.
// Constant given at compilation: KIND, 0 for single precision, 1 for float16, 2 for bfloat16.

#if KIND == 0
using Value = float;
__device__ __forceinline__ float widened(Value value) { return value; }
__device__ __forceinline__ Value lowered(float value) { return value; }
#else
using Value = unsigned short;
#endif

#if KIND == 2
union Bits {
    float value;
    unsigned bits;
};
__device__ __forceinline__ float widened(Value value) {
    Bits wide;
    wide.bits = (unsigned)value << 16;
    return wide.value;
}
__device__ __forceinline__ Value lowered(float value) {  // to the nearest, half way to the even one; NaN stays
    Bits wide;
    wide.value = value;
    return value != value ? 0x7fc0 : (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
}
#endif

#if KIND == 1 && defined(__CUDACC__)
__device__ __forceinline__ float widened(Value value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}
__device__ __forceinline__ Value lowered(float value) {
    Value half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
#endif

constexpr int VALUES = 16 / sizeof(Value);
struct alignas(16) Piece {
    Value of[VALUES];
};

// x (images, pixels, C) and the shortcut have `inputs` and `shortcuts` pieces: those of one draw serve all draws. out has
// `count`, those of each draw `each`; scale and shift (t, C), `pitch` values from row to row, C `pieces` of a pixel
extern "C" __global__ void scaled(const Piece *__restrict__ x, const float *__restrict__ scale,
                                  const float *__restrict__ shift, const Piece *__restrict__ shortcut,
                                  Piece *__restrict__ out, int count, int each, int pieces, int pitch, int inputs,
                                  int shortcuts, double slope) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const long long at = (long long)(i / each) * pitch + i % pieces * VALUES;
    const float4 *scales = (const float4 *)(scale + at), *shifts = (const float4 *)(shift + at);
    Piece y = x[i % inputs], added;
    if (shortcuts) added = shortcut[i % shortcuts];
#pragma unroll
    for (int quarter = 0; quarter < VALUES / 4; quarter++) {
        const float4 a = scales[quarter], b = shifts[quarter];
        const float factors[4] = {a.x, a.y, a.z, a.w}, terms[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Value &value = y.of[4 * quarter + j];
            value = lowered(fmaf(widened(value), factors[j], terms[j]));
            if (shortcuts) value = lowered(widened(value) + widened(added.of[4 * quarter + j]));
            const float sum = widened(value);
            if (!(sum > 0) && slope != 1) value = lowered(slope == 0 && sum < 0 ? 0 : (float)slope * sum);
        }
    }
    out[i] = y;
}
