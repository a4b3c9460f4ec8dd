"""The whole pipeline on a small synthetic language: supervised fine-tuning, a reward model, PPO."""
