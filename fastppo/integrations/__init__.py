"""FastPPO's losses in other trainers: TRL and verl."""
