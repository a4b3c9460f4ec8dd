"""Stateless functions on tensors: losses, statistics of tokens, advantages."""
