"""PyTorch backend: the definition, row block by row block."""
