// The CUDA kernel of `probabilities`: softmax of every draw's logits; its moments about the first draw, and
// sums of divergences from it, q [(1 + r) log(1 + r) - r] with r = (p - q) / q and q the first draw, at least `least`.
// As operations of their own they are a dozen passes over memory.
//
// A thread takes one place, a pixel of an image: all classes of all draws.
// Constants given at compilation: CLASSES.

constexpr int K = CLASSES;

// logits (draws, n, K, pixels) in steps of of_draw, of_image, of_class and of_pixel; pivot, sum and squares (n, K, pixels)
// and divergences (n, pixels) are added to, or begun if begin is not 0. places = n pixels.
extern "C" __global__ void probabilities(const float *__restrict__ logits, float *__restrict__ pivot,
                                         float *__restrict__ sum, float *__restrict__ squares,
                                         float *__restrict__ divergences, int draws, int places, int pixels, int of_draw,
                                         int of_image, int of_class, int of_pixel, int begin, double tau,
                                         double least) {
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= places) return;
    const int image = place / pixels, pixel = place % pixels, own = image * K * pixels + pixel;
    float first[K], total[K] = {}, square[K] = {}, divergence = 0;
#pragma unroll
    for (int k = 0; k < K; k++) first[k] = begin ? 0 : pivot[own + k * pixels];
    for (int t = 0; t < draws; t++) {
        const float *from = logits + (long long)t * of_draw + image * of_image + pixel * of_pixel;
        float p[K], most, whole = 0;
#pragma unroll
        for (int k = 0; k < K; k++) {
            p[k] = from[k * of_class] * (float)tau;
            most = k ? fmaxf(most, p[k]) : p[k];
        }
#pragma unroll
        for (int k = 0; k < K; k++) whole += p[k] = expf(p[k] - most);
#pragma unroll
        for (int k = 0; k < K; k++) {
            p[k] /= whole;
            if (t == 0 && begin) first[k] = p[k];
            float away = p[k] - first[k];
            total[k] += away;
            square[k] += away * away;
            const float q = fmaxf(first[k], (float)least), r = (p[k] - q) / q;
            divergence += r != -1 ? q * ((1 + r) * log1pf(r) - r) : q;  // -1: p is 0, or nothing beside q
        }
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int at = own + k * pixels;
        if (begin) pivot[at] = first[k];
        sum[at] = begin ? total[k] : sum[at] + total[k];
        squares[at] = begin ? square[k] : squares[at] + square[k];
    }
    divergences[place] = begin ? divergence : divergences[place] + divergence;
}
