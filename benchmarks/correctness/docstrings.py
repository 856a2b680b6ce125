"""A small set of real texts that every Python has: docstrings of its standard library, to be told apart by package.

>>> data = docstrings(packages=("json", "ctypes"), length=8, vocabulary=50)
>>> data.tokens.shape[1], sorted(set(data.labels.tolist())), bool((data.tokens[:, 0] == START).all())
(8, [0, 1], True)
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import pathlib
import re
import sysconfig
from collections.abc import Iterator, Sequence

import numpy as np


PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest", "xml")
PADDING, UNKNOWN, START = range(3)


@dataclasses.dataclass(frozen=True)
class Texts:
    """`tokens` (texts, length), the first of each is `START`; `labels` (texts,); `tests`: the texts kept for the end."""

    tokens: np.ndarray
    labels: np.ndarray
    tests: np.ndarray
    words: int

    def part(self, tests: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of the texts to learn from, or of those to test with."""
        chosen = self.tests if tests else ~self.tests
        return self.tokens[chosen], self.labels[chosen]


def docstrings(packages: Sequence[str] = PACKAGES, length: int = 32, vocabulary: int = 2000) -> Texts:
    """Docstrings of functions and classes in pieces of `length`; every fifth docstring is for tests.

    - `vocabulary`: the most frequent words of the others; what remains is `UNKNOWN`.
    """
    pieces: list[tuple[list[str], int, bool]] = []
    for label, package in enumerate(packages):
        for k, words in enumerate(_docstrings_of(package)):
            starts = range(0, max(1, len(words) - 5), length - 1)
            pieces += [(words[i : i + length - 1], label, k % 5 == 0) for i in starts]
    count = collections.Counter(w for words, _, test in pieces if not test for w in words)
    number = {w: i for i, (w, _) in enumerate(count.most_common(vocabulary - 3), 3)}
    tokens = np.full((len(pieces), length), PADDING, np.int32)
    for row, (words, _, _) in zip(tokens, pieces, strict=True):
        row[: len(words) + 1] = [START, *(number.get(w, UNKNOWN) for w in words)]
    labels = np.array([label for _, label, _ in pieces], np.int32)
    return Texts(tokens, labels, np.array([test for *_, test in pieces]), vocabulary)


def _docstrings_of(package: str) -> Iterator[list[str]]:
    """The words of each docstring of at least six."""
    seen = set[str]()
    for file in sorted((pathlib.Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())
                if len(words) >= 6 and text not in seen:
                    seen.add(text)
                    yield words
