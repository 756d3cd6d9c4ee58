"""Benchmarks: each asserts closeness to a reference, then times it with scripts.benchmark.timing."""
