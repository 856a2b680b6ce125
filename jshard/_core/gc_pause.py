"""Pause Python's garbage collector while planning.

Planning a deep program allocates some hundred thousand small objects that all stay alive; the collector traverses them
and JAX's equations repeatedly in search of cycles, which took a quarter of the planning time of 126 layers. Planning
leaves no large cycles behind, so the collector is disabled meanwhile. Its state is global to the process: it is restored
in any case, and not touched if the user has disabled it. Of two threads that plan at once, one may enable it early for
the other; it is never left disabled.

>>> import gc
>>> with gc_paused():
...     gc.isenabled()
False
>>> gc.isenabled()
True
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


_MANY_OBJECTS = 10_000  # new ones, whose traversal takes a millisecond or more


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """A context, or decorator, in which the garbage collector is disabled."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Moves new objects to the oldest generation, so that the next collection does not traverse them.
            # Not if the user has frozen objects, which are counted one by one: `unfreeze` would thaw those too.
            if gc.get_count()[0] >= _MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
