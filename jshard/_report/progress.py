"""A progress line on a terminal or in a notebook.

Standard error that is not a terminal stays empty. The line is erased when the work ends, so that it does not mix with
results.

>>> import io
>>> terminal = io.StringIO()
>>> with progress("sweep", 4, stream=terminal, shown=True) as show:
...     show(1, "v5e:4x8")
>>> "sweep [#####---------------] 1/4 v5e:4x8" in terminal.getvalue(), terminal.getvalue().endswith("\\r")
(True, True)
"""

from __future__ import annotations

import contextlib
import html
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


BAR_WIDTH = 20
WIDTH = 98
REFRESH_SECONDS = 0.5  # between two updates of the clock


@contextlib.contextmanager
def progress(
    title: str,
    total: int | None = None,
    *,
    after: float = 0.0,
    shown: bool | None = None,
    stream: Any = None,
) -> Iterator[Callable[..., None]]:
    """A function `show(done, text)` that draws how far the work is, while the `with` block runs.

    Arguments:

    - `title`: what is being done.
    - `total`: number of steps; None if unknown, then the elapsed seconds are shown.
    - `after`: seconds until the line appears.
    - `shown`: whether to show it; None: on a terminal or in a notebook only.
    - `stream`: where the line goes; default: standard error.
    """
    write = _line_writer(stream or sys.stderr, shown)
    if write is None:
        yield lambda done=0, text="": None
        return
    begin, state, over = time.monotonic(), [0, ""], threading.Event()
    lock = threading.Lock()

    def draw() -> None:
        with lock:
            past = time.monotonic() - begin
            if past >= after and not over.is_set():
                write(progress_line(title, state[0], total, state[1], past))

    def show(done: int = 0, text: str = "") -> None:
        state[:] = done, text
        draw()

    def clock() -> None:
        while not over.wait(REFRESH_SECONDS):
            draw()

    thread = threading.Thread(target=clock, name="jshard progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        with lock:
            over.set()
        thread.join()
        write("")


def progress_line(title: str, done: int, total: int | None, text: str, past: float) -> str:
    """One line of progress.

    >>> progress_line("planning step", 0, None, "", 3.14)
    'planning step 3 s'
    >>> progress_line("sweep", 2, 2, "", 75)
    'sweep [####################] 2/2 75 s'
    """
    bar = ""
    if total:
        full = BAR_WIDTH * done // total
        bar = f"[{'#' * full}{'-' * (BAR_WIDTH - full)}] {done}/{total}"
    clock = f"{past:.0f} s" if past >= 1 else ""
    return " ".join(part for part in (title, bar, clock, text) if part)[:WIDTH]


def search_status(stage: str, best: float, bound: float) -> str:
    """The stage of a search; its best solution, bound and gap, once there are any (seconds, bytes at level 1).

    >>> search_status("messages and blocks", 2.0, 1.6), search_status("reductions", float("inf"), float("-inf"))
    ('messages and blocks: best 2, bound 1.6, gap 25%', 'reductions')
    >>> search_status("prices on 1 times, round 1", float("inf"), 1.6)
    'prices on 1 times, round 1: no plan yet, bound 1.6'
    """
    stage = stage.partition(":")[0]
    if bound <= 0:
        return stage
    if not math.isfinite(best):
        return f"{stage}: no plan yet, bound {bound:.4g}"
    return f"{stage}: best {best:.4g}, bound {bound:.4g}, gap {100 * max(best - bound, 0.0) / bound:.2g}%"


def _line_writer(stream: Any, shown: bool | None) -> Callable[[str], None] | None:
    """A function that overwrites the line with a new one; None if the line should not be shown."""
    if shown is False:
        return None
    page = _notebook_writer() if stream is sys.stderr else None
    if page is not None:
        return page
    if shown is None and not (getattr(stream, "isatty", None) and stream.isatty()):
        return None
    last = [0]

    def write(text: str) -> None:
        stream.write("\r" + text.ljust(last[0]) + ("" if text else "\r"))
        stream.flush()
        last[0] = len(text)

    return write


def _notebook_writer() -> Callable[[str], None] | None:
    """The same for a running Jupyter cell, None elsewhere; IPython is never imported here."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if ipython is None or shell is None or not hasattr(shell, "kernel"):
        return None
    display, page = ipython.display.display, ipython.display.HTML
    handle: list[Any] = []

    def write(text: str) -> None:
        shown = page(f"<pre>{html.escape(text)}</pre>" if text else "")
        if handle:
            handle[0].update(shown)
        elif text:
            handle.append(display(shown, display_id=True))

    return write
