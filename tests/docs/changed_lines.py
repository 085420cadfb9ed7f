"""How many lines make one script another: python -m tests.docs.changed_lines examples/train.py examples/train_ddp.py

Statements count as one line each, however they are broken. Comments, docstrings, blank lines and indentation do not
count.
"""

import ast
import sys
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

__all__ = ["Changed", "changed_lines", "main"]


@dataclass(frozen=True)
class Changed:
    """Lines that are new or changed, and lines that are gone with nothing in their place."""

    written: int
    removed: int


def changed_lines(before: str, after: str) -> Changed:
    """
    >>> changed_lines("x = 1\\ny = 2\\nz = 3", "x = 1\\ny = (\\n    4\\n)  # why")
    Changed(written=1, removed=1)
    """
    old, new = _lines(before), _lines(after)
    written = removed = 0
    for kind, begin, end, new_begin, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            written += new_end - new_begin
            removed += max(0, (end - begin) - (new_end - new_begin))
    return Changed(written, removed)


def _lines(text: str) -> list[str]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


def main(before: str, *others: str) -> None:
    for other in others:
        changed = changed_lines(Path(before).read_text(encoding="utf-8"), Path(other).read_text(encoding="utf-8"))
        print(f"{other}: {changed.written} written, {changed.removed} removed")


if __name__ == "__main__":
    main(*sys.argv[1:])
