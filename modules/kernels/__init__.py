"""Single-device kernels, one operator a file: equation, plain PyTorch reference, Triton kernel, wrapper."""
