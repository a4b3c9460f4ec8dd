"""The benchmark suite: compare every operation with its peers and its physical floor.

Run `pytest benchmarks` in the repository's root. `shapes` has the sizes, `cases` the operations
(inputs, truth, bytes, FLOP, providers), `measure` the timers. `test_cases` checks and times each
provider, and `test_promises` the ratios that the project promises. The suite is not installed with
the package.
"""

import os

# Silences the profiler's library, which reads this variable when torch is loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
