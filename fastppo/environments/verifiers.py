"""Environments of verifiers: of its classic API up to 0.3, of `verifiers.v1` from 0.4 on."""

import verifiers

if hasattr(verifiers, "load_environment"):
    from fastppo.environments.verifiers_classic import load_environment, load_prompts
else:
    from fastppo.environments.verifiers_v1 import load_environment, load_prompts

__all__ = ["load_environment", "load_prompts"]
