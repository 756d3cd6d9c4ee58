"""Everything distributed: launch, mesh, tensor and pipeline parallelism; no other folder imports torch.distributed."""
