"""``python -m clipwise``: the command, where it is not on the path.

Receives: the arguments of the command line.
Gives: the command's exit code.
"""

import sys

from clipwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
