"""The compiled loops of `fastppo_kernels.cpu_backend`."""
