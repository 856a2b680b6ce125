"""`python -m jshard`: plan a function of a module, print, compare and convert saved plans, look at the machine."""

from __future__ import annotations

import sys

from jshard._api.command_line import main


if __name__ == "__main__":
    sys.exit(main())
