// The kernel of `mcbn.engine.kernels.scaled` on the host.

#include <cstring>

#include "cuda_on_host.h"

#if KIND == 1
static float widened(unsigned short value) {
    _Float16 half;
    std::memcpy(&half, &value, 2);
    return half;
}
static unsigned short lowered(float value) {
    _Float16 half = value;
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
#endif

#include KERNEL

extern "C" void run(int blocks, const Piece *x, const float *scale, const float *shift, const Piece *shortcut,
                    Piece *out, int count, int each, int pieces, int pitch, int inputs, int shortcuts, double slope) {
    run_blocks(blocks, [=] {
        scaled(x, scale, shift, shortcut, out, count, each, pieces, pitch, inputs, shortcuts, slope);
    });
}
