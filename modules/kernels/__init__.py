"""Single-device kernels, one operator per file: equation, plain PyTorch reference, Triton kernel, wrapper.

Library or own kernel, by operator (one H100, batch 1, 16-bit weights; share of what a pure read of memory reaches):

    operator                        served by                     why
    MLP, dense or sparse            sparse_mlp                    dense 0.95-1.0, cuBLAS 0.77-0.89
    queries, keys, values           qkv_projection                0.81 (3B model), 0.93 (OPT)
    vocabulary head                 norm_linear                   0.87-0.95; tiles in shared memory (cp.async) 0.855
    attention of one token          decode_attention              4 us at 512 positions
    several rows, and prefill       library (SDPA, cuBLAS)        products of matrices are what it is built for
"""
