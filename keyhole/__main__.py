"""`python -m keyhole` is the command `keyhole`."""

from __future__ import annotations

import sys

from keyhole.cli import main

sys.exit(main())
