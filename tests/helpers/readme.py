"""The README's code runs as pasted, on a machine with one device, and prints what the README shows.

`make readme` (this file as a program) writes what the code prints today into the README.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile


ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(\s*```text\n(?P<output>.*?)```)?", flags=re.DOTALL)
MARK = "-- end of block --"


def blocks(readme: str) -> list[tuple[str, str | None]]:
    """Each Python block with the text block that follows it at once, if one does."""
    return [(match["code"], match["output"]) for match in BLOCK.finditer(readme)]


def fresh_environment() -> dict[str, str]:
    """The environment without settings of JAX and XLA, as on a machine with one device."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment["PYTHONPATH"] = str(ROOT) if (ROOT / "jshard").exists() else ""  # else the installed wheel's
    return environment


def printed(codes: list[str]) -> list[str]:
    """What each block prints; they run one after the other in one fresh interpreter, as on a machine with one device."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "readme.py")  # plans name the file that a line stands in
        program.write_text("".join(f"{code}\nprint({MARK!r})\n" for code in codes))
        done = subprocess.run(
            [sys.executable, program], env=fresh_environment(), capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(f"{MARK}\n")[:-1]


def with_output(readme: str, outputs: list[str]) -> str:
    """The README with each text block that follows a Python block replaced by what that one printed."""
    rest = iter(outputs)

    def fill(match: re.Match[str]) -> str:
        got = "\n".join(lines(next(rest)))
        if match["output"] is None:
            return match[0]
        return match[0][: match.start("output") - match.start()] + f"{got}\n```"

    return BLOCK.sub(fill, readme)


def lines(text: str) -> list[str]:
    """Lines without blanks at their ends, which Markdown editors remove."""
    return [line.rstrip() for line in text.strip().splitlines()]


def check(page: pathlib.Path) -> None:
    """Raise an `AssertionError` at the first block that does not print what the page shows."""
    found = blocks(page.read_text())
    assert found and found[0][1] is not None, "the README opens with code and its output"
    for (code, expected), got in zip(found, printed([code for code, _ in found]), strict=True):
        if expected is not None:
            assert lines(got) == lines(expected), code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:  # `make release`, with the installed wheel
        check(pathlib.Path(sys.argv[2]))
    else:
        page = ROOT / "README.md"
        readme = page.read_text()
        page.write_text(with_output(readme, printed([code for code, _ in blocks(readme)])))
