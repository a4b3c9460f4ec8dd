"""Rewards: functions over text, reward models, ensembles, and the scores of a batch."""
