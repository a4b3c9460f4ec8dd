"""Kernels of FastPPO: tensors and records in, tensors and records out; no policy, no trainer.

`definition` says what every operation is, in plain PyTorch to be read: it is the specification, and
what tests compare with. Three backends have its operations under the same names: `cpu_rows` and
`cpu_advantages`, loops that numba compiles; `triton_rows` and `triton_advantages`, a GPU's kernels;
`torch_rows` and `torch_advantages`, the definition itself a chunk of rows at a time, for devices
that have neither. `linear` is the loop around the lm-head for all. All take the records of
`records`. The package depends on torch, Triton and numba alone, so it can be lifted out and used by
itself.
"""
