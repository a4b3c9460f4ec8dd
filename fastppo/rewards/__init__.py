"""Rewards: functions over text, reward models, ensembles, and what becomes of their scores."""
