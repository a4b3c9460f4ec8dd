"""Kernels of FastPPO: tensors in, tensors out, no autograd, no policy, no trainer.

Every operation has a plain-PyTorch definition in :mod:`fastppo_kernels.reference`. It is the
specification, the oracle of the tests, and what runs on a machine without a GPU. The package
depends on torch (and Triton) alone, so it can be lifted out and used by itself.
"""
