"""Kernels that talk to other GPUs through symmetric memory; those of one GPU are in modules/kernels."""
