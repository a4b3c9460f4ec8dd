"""The kernels of `fastppo_kernels.triton_backend`."""
