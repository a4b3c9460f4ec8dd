"""Environments: turns, tools, agents, and adapters for other packages' environments."""
