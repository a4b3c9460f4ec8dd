"""The PPO stage: the algorithm in `trainer`, and what it runs on."""
