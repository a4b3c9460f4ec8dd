"""Transformers as PPO sees them: a trunk, an lm-head, a value function, a reference policy."""
