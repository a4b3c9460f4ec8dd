"""The benchmark suite: every operation beside its peers and beside its physical floor.

`python -m benchmarks` from the repository's root. `shapes` names what is measured, `cases` says
what an operation is (inputs, truth, bytes, FLOP) and who provides it, `measure` times, `run` checks
each provider and has it measured, `report` prints and writes. Nothing here is installed with the
package.
"""

import os

# The profiler's library prints a line per start and stop otherwise; it is read when torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

CASES = {
    "loss": "from logits, with its gradient and forward alone, with and without an entropy bonus",
    "statistics": "logprobs and entropy from logits, no gradient",
    "linear-loss": "loss and its gradients from hidden states and the lm-head",
    "linear-logprobs": "logprobs from hidden states and the lm-head, no gradient",
    "gae": "generalised advantage estimation",
    "advantages": "reward shaping, GAE and whitening in one call",
    "whiten": "masked whitening",
    "update": "one PPO update of a model: the learner alone",
    "sweeps": "some of these over N, V and T, with the exponent of their growth",
}
"""The names of cases, and what each times."""
