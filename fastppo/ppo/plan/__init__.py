"""Memory estimates for PPO runs."""
