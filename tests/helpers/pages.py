"""The code of the pages in `docs/`: what its blocks print, compared with the text that follows them, or written there.

All pages run in one fresh interpreter, one after the other, each in a namespace of its own, so that JAX is started once.
A page's first block sets up what it needs, so it can be pasted into `python` as well. `make pages` (this file as a
program) writes what the code prints today into the pages, or into those that are named.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence

from tests.helpers.readme import MARK, ROOT, blocks, fresh_environment, lines, with_output


RUNNER = """
import json, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
for name, text in json.load(sys.stdin):
    try:
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        print(name, "failed", file=sys.stderr)
        raise
"""


def pages_with_code() -> list[pathlib.Path]:
    """The pages of `docs/` that have a Python block."""
    return sorted(p for p in (ROOT / "docs").rglob("*.md") if blocks(p.read_text()))


def printed(pages: Sequence[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """What each block of each page, (name, blocks), prints; an `AssertionError` with the traceback where one raises."""
    import json

    programs = [
        (f"{name}.py", "".join(f"{code}\nprint({MARK!r})\n" for code in codes)) for name, codes in pages
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(programs), env=fresh_environment(), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    texts = iter(done.stdout.split(f"{MARK}\n")[:-1])
    return [[next(texts) for _ in codes] for _, codes in pages]


def differences(paths: Iterable[pathlib.Path]) -> list[str]:
    """Blocks that do not print what their page shows, as `page: code`."""
    texts = {p: p.read_text() for p in paths}
    got = printed([(p.stem, [code for code, _ in blocks(t)]) for p, t in texts.items()])
    return [
        f"{path.name}: {code}\nprints:\n{said}"
        for (path, text), outputs in zip(texts.items(), got, strict=True)
        for (code, expected), said in zip(blocks(text), outputs, strict=True)
        if expected is not None and lines(said) != lines(expected)
    ]


def write(paths: Sequence[pathlib.Path]) -> None:
    """Put what the blocks print today into the pages."""
    texts = [p.read_text() for p in paths]
    got = printed([(p.stem, [code for code, _ in blocks(t)]) for p, t in zip(paths, texts, strict=True)])
    for path, text, outputs in zip(paths, texts, got, strict=True):
        path.write_text(with_output(text, outputs))


if __name__ == "__main__":
    write([pathlib.Path(p) for p in sys.argv[1:]] or pages_with_code())
