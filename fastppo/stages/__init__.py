"""The stages before PPO: supervised fine-tuning and the reward model."""
