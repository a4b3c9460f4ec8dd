"""Kernels of FastPPO: functions from tensors and records to tensors and records.

`definition` specifies every operation in plain PyTorch, and tests compare with it. Three backends
implement it under the same names: `cpu_backend`, loops compiled by numba; `triton_backend`, GPU
kernels; and `torch_backend`, the definition in chunks of rows, for devices without a backend.
`linear` is the loop over chunks of the lm-head's rows for all three. `records` holds the operand
and result types. The package depends only on torch, Triton and numba, and can be used by itself.
"""
