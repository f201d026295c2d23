"""`python -m jaxattn`."""

import sys

from jaxattn.cli import main

sys.exit(main())
