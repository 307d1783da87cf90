"""`python -m retrysafe` is the command line."""

import sys

from retrysafe.cli import main

sys.exit(main())
