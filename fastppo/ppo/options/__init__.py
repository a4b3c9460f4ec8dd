"""The options of a PPO run."""
