"""Everything distributed: launch, mesh, tensor and pipeline parallelism; nobody else imports torch.distributed."""
