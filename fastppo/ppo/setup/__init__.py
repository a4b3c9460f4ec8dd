"""Builds and checks the parts of a PPO run."""
