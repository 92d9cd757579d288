"""`python -m diffusers_continuous.cli` is `diffusers-continuous`."""

import sys

from . import main

sys.exit(main())
