"""Triton backend."""
