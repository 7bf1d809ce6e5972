"""`python -m ggjit COMMAND`."""

import sys

from ggjit.cli import main

if __name__ == "__main__":
    sys.exit(main())
