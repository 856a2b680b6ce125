"""A progress line on a terminal or in a notebook, for what may take longer than a moment.

Nothing is shown where nobody looks: standard error that is not a terminal stays empty. The line is erased when
the work ends, so that it never mixes with results.

>>> import io
>>> said = io.StringIO()
>>> with progress("sweep", 4, stream=said, shown=True) as show:
...     show(1, "v5e:4x8")
>>> "sweep [#####---------------] 1/4 v5e:4x8" in said.getvalue(), said.getvalue().endswith("\\r")
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
REFRESH_SECONDS = 0.5  # seconds between two looks at the clock


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
    - `total`: number of steps; None when nobody knows, then the seconds are shown.
    - `after`: seconds before anything is drawn.
    - `shown`: None for a terminal or a notebook only.
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

    >>> line("planning step", 0, None, "", 3.14)
    'planning step 3 s'
    >>> line("sweep", 2, 2, "", 75)
    'sweep [####################] 2/2 75 s'
    """
    bar = ""
    if total:
        full = BAR_WIDTH * done // total
        bar = f"[{'#' * full}{'-' * (BAR_WIDTH - full)}] {done}/{total}"
    clock = f"{past:.0f} s" if past >= 1 else ""
    return " ".join(part for part in (title, bar, clock, text) if part)[:WIDTH]


def search_status(stage: str, best: float, bound: float) -> str:
    """Where a search stands, in a few words; it says nothing while nothing is found.

    >>> search_state("messages and blocks", 2.0, 1.6), search_state("reductions", float("inf"), float("-inf"))
    ('messages and blocks, gap 25%', 'reductions')
    """
    stage = stage.partition(":")[0]
    if not math.isfinite(best) or bound <= 0:
        return stage
    return f"{stage}, gap {100 * max(best - bound, 0.0) / bound:.2g}%"


def _line_writer(stream: Any, shown: bool | None) -> Callable[[str], None] | None:
    """What draws a line over the last one; None where nobody would see it."""
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
    """What draws in a running Jupyter cell; None elsewhere. IPython is not imported, only found."""
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
