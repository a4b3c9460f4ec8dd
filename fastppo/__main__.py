"""`python -m fastppo` is `fastppo`."""

import sys

from fastppo.cli import program

sys.exit(program())
