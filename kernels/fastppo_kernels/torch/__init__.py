"""PyTorch backend: the definition in chunks of rows."""
