"""Numbers that decide how fast the engine is, never what it computes; each with the measurement behind it.

"H200" and "2 cores" are the machines of benchmarks/README.md, with results/ beside it: constants.jsonl has times at
other values, registers.txt what the compiler makes of the kernels at others: registers, and bytes of a thread that they
cannot hold. A width is the number of values of the widest intermediate result of a pass, all its inputs together.
"""

# Plans: when they are prepared and compared
DRAWS_BEFORE_PLAN = 32  # of a shape, for which a plan is prepared: 1 costs 20 draws of the MLP 1.2 times, 128 100 3.8
GROWN_RANGE = 2  # inputs so many times larger or smaller than those a plan was compared on: it is compared again
EXACT_INPUTS = 8  # at most, by which rounding is measured; of fewer inputs several draws; 2 to 32 cost alike
CPU_EXACT_WIDTH = 2**17  # of all of them, but two at least, in double precision: 2^13 to 2^21 cost alike
GPU_EXACT_WIDTH = 2**23  # 64 MB
CALLS_WITHOUT_KERNELS = 3  # by the network's own code while kernels are compiled (4 s, ResNet-32); the next one waits

# Plans: draws in one pass
CPU_CHUNK = 600_000  # width of all draws of a pass: a quarter costs 1.2 to 1.5 times as much, 4 times it gains 0 to 7 %
CPU_FOLD = 2**17  # width of one draw from which convolutions fill 2 cores: fold, one a pass; half costs up to 1.3 times
GPU_CHUNK = 2**24  # 64 MB in single precision; 2^20 costs 2.4 times (ResNet-32, N = 32), 2^27 wins 0 to 10 %
GPU_CHUNK_FLAT = 2**22  # without convolutions, where four draws fit: 2^27 wins 4 % at most, for 15 times the memory
GPU_FOLD = 3_500_000  # as CPU_FOLD: ResNet-50, N = 4, below it 12 to 14 ms, folded 21; N = 1 folded 12 for 4
MOSTLY_NARROW = 0.7  # share of convolutions that kernels take from which they beat folding, by 1.7 to 2.4 times
FOLD_FROM = 1000  # inputs of stacked draws from which products with folded weights are faster: the MLP by a tenth

# Plans: CUDA graphs
GPU_GRAPH = 2**28  # width of a pass up to which a graph pays: ResNet-50, N = 256, 409 -> 399 ms, fp16 279 -> 260
GPU_GATHER = 2**22  # outputs handed on at once: who reads them launches kernels too; ResNet-50, N = 256: 484 -> 441 ms
GPU_PASSES = 8  # at most in one graph: 1 costs 1.2 times, 2 to 32 are within 3 %
SIDE_BY_SIDE = 2  # of them: one alone in a graph costs 1.2 times (ResNet-32 and ResNet-50, N = 32)
SMALL_SIDE_BY_SIDE = 4  # of one draw: ResNet-50, N = 32, 2 to 4: fp16 38.4, 36.5, 35.6 ms, fp32 59.3, 59.0, 59.9
SMALL_PASS = 2**25  # width of a pass of one draw up to which, for the memory each has: ResNet-50, 0 to 2^28 within 1 %
PASSES_BEFORE_CAPTURE = 4  # verifying and a first call are not worth a graph; without graphs 1.4 to 7 times

# Inputs of one pass, on a CPU
CPU_BLOCK = 2**17  # width of a block without convolutions: the MLP, N = 20,000, T = 50, 1 thread: 439 -> 303 ms
CPU_BLOCK_CONVOLUTIONAL = 2**19  # and with them: ResNet-32, N = 128, T = 2, 1 thread: 1.27 -> 1.10 s
PLANS_KEPT = 16  # shapes of inputs, least recent go: bounds memory; costs time where more shapes take turns

# Recording
CPU_GROUP_WIDTH = 2**14  # of one batch up to which a group pays: without, the MLP takes 2.7 times; at 2^20 ResNet-32 5
GPU_GROUP_WIDTH = 2**20  # at 2^16 ResNet-32 takes 3.2 times, without groups the MLP 3.8; 2^24 wins nothing
CPU_TRACED_WIDTH = 2**22  # of one batch from which no program is proven: 2^18 costs ResNet-32, T = 128, 9 %
CPU_RELEASED_FROM = 2**20  # values of a batch's inputs: 7 ms of a pass of 1 s, ResNet-18 at 224 px; 1,095 -> 739 MB
PROGRAMS_KEPT = 4  # shapes of batches that are traced: bounds memory, as PLANS_KEPT

# Kernels (results/narrow.txt, on the H200; results/registers.txt)
NARROW_MOST_INPUTS = 256  # channels: of 192, cuDNN's convolution alone takes half as long as ours with all behind it
NARROW_OUTPUTS = (16, 32, 64)  # channels; other numbers of outputs are filled up to one of these
NARROW_ALONE = 16  # outputs up to which the kernel beats cuDNN with nothing behind the convolution
NARROW_PIXELS = (128, 64)  # of a block, the first whose inputs fit: 64 read 1.7 pixels for one, 128 1.4, 256 spill
NARROW_COLUMNS = (16, 32)  # beside each other at most, the second for whole rows: 8 read as many, 32 of 256 1.6 for one
NARROW_MOST_WORK = 1.25  # pixels computed for one wanted, over the edges of an image: 4 costs a UNet 15 %, 2 nothing
NARROW_WARPS = 4  # of a block: with 2 threads spill up to 140 bytes, with 1 4,300
NARROW_BLOCKS = (4, 4, 3)  # that a multiprocessor holds, by NARROW_OUTPUTS: more spill 120 bytes a thread, these 56
NARROW_BLOCKS_OF_16 = 8  # from 16 inputs to 16 outputs: 24 bytes; of 12 blocks 432
THREADS = 256  # of a block of the kernels `scaled` and `halved`: 128 the same, 64 and 512 cost ResNet-50 a tenth
PROBABILITIES_THREADS = 128  # of a block: 32 classes take 168 registers (sm_90): 384 threads fit, of blocks of 256 256
PROBABILITIES_MOST_CLASSES = 32  # 40 take 237 registers, 64 spill
PROBABILITIES_LEAST_PLACES = 2**13  # a thread each: 64 blocks for the 132 multiprocessors of an H200; not timed
