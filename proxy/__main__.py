"""Run kvbus by `python -m proxy`."""

import sys

from proxy.cli import main

sys.exit(main())
