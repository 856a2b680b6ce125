"""Optional libraries, imported where they are used; if one is missing, the error names the extra to install.

>>> require("math", "report", "an example").pi > 3
True
"""

from __future__ import annotations

import importlib
from typing import Any

from jshard._core.errors import ShardError


def require(module: str, extra: str, where: str) -> Any:
    """Import a module; if it is missing, raise a `ShardError` that says what to install.

    >>> require("no_such_module", "report", "Sweep.plot")
    Traceback (most recent call last):
    ...
    jshard._core.errors.ShardError: Sweep.plot needs no_such_module, which is not installed
      where: Sweep.plot
      write instead: pip install 'jshard[report]', or pip install no_such_module
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != package:
            raise  # it is installed, but one of its own imports is missing: that error says more
        raise ShardError(
            f"{where} needs {package}, which is not installed",
            where=where,
            fix=f"pip install 'jshard[{extra}]', or pip install {package}",
        ) from None
