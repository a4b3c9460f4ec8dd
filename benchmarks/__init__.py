"""The benchmark suite: every operation beside its peers and beside its physical floor.

`python -m benchmarks` from the repository's root. `shapes` names what is measured, `cases` says
what an operation is (inputs, truth, bytes, FLOP) and who provides it, `measure` times, `run` checks
each provider and has it measured, `report` prints and writes. Nothing here is installed with the
package.
"""

import os

# The profiler's library prints a line per start and stop otherwise; it is read when torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
