"""Planning without Python's garbage collector.

Problem.  A plan of a deep program is made of some hundred thousand small objects that all stay; Python's collector
walks them again and again in search of cycles, and JAX's equations with them: a quarter of the planning of 126 layers.

Idea.  Nothing that planning leaves behind is cyclic and large, so the collector rests meanwhile. It is the process's
own, so it is set back whatever happens, and left alone where the user has switched it off. Two threads that plan
at once may wake it early for each other, never leave it asleep.

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


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """The garbage collector rests inside; as a decorator, while the function runs."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            # What is new is called old without a walk over it, which would be the first thing that it does awake.
            # Not where the user has frozen something: thawing cannot tell it apart.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
