"""Kernels of FastPPO: tensors and records in, tensors and records out; no policy, no trainer.

`definition` says what every operation is, in plain PyTorch to be read: it is the specification, and
what tests compare with. `torch_rows` and `torch_advantages` are the backend for a machine without a
GPU; `triton_rows` and `triton_advantages` are the kernels; `linear` is the loop around the lm-head
for both. All take the records of `records`. The package depends on torch (and Triton) alone, so it
can be lifted out and used by itself.
"""
