"""Where a job's device memory is, and what preallocation would give back, from a memory snapshot of PyTorch's."""
