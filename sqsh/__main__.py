"""`python -m sqsh`."""

import sys

from sqsh.cli import main

sys.exit(main())
