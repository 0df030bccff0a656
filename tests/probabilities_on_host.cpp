// The kernel of `mcbn.kernels.probabilities` on the host.

#include "cuda_on_host.h"
#include KERNEL

extern "C" void run(int blocks, const float *logits, float *pivot, float *sum, float *squares, float *divergences,
                    int draws, int places, int pixels, int of_draw, int of_image, int of_class, int of_pixel, int begin,
                    double tau, double least) {
    run_blocks(blocks, [=] {
        probabilities(logits, pivot, sum, squares, divergences, draws, places, pixels, of_draw, of_image, of_class,
                      of_pixel, begin, tau, least);
    });
}
