"""The benchmark suite: every operation against its peers and its physical floor.

Run `pytest benchmarks` in the repository's root. `shapes` has the sizes, `cases` the operations
(inputs, truth, bytes, FLOP, providers), `measure` the timers. `test_cases` checks and times each
provider, and `test_promises` the ratios that the project promises. The suite is not installed with
the package.
"""

import os

# Silences the profiler's library. It reads this when torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
