"""`python -m fastppo` is `fastppo`."""

import sys

from fastppo.cli import main

sys.exit(main())
