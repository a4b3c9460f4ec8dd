"""Run all three stages on a synthetic language: supervised fine-tuning, reward model, PPO."""
