"""Runs to begin with: each a config, what it reads, and a command; see `catalogue`."""
