"""The benchmark suite: every operation against its peers and its physical floor.

Run `python -m benchmarks` in the repository's root. `shapes` has the sizes, `cases` the operations
(inputs, truth, bytes, FLOP, providers), `measure` the timers, `run` checks and times each provider,
and `report` prints and writes. The suite is not installed with the package.
"""

import os

# Silences the profiler's library. It reads this when torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

CASES = {
    "loss": "from logits, with and without gradient and entropy bonus",
    "statistics": "logprobs and entropy from logits, no gradient",
    "linear-loss": "loss and its gradients from hidden states and the lm-head",
    "linear-logprobs": "logprobs from hidden states and the lm-head, no gradient",
    "gae": "generalized advantage estimation",
    "advantages": "reward shaping, GAE and whitening in one call",
    "whiten": "masked whitening",
    "update": "one PPO update of a model, without generation",
    "sweeps": "some of these over N, V and T, with growth exponents",
}
"""Descriptions of the cases by name."""
