"""The documentation as data: fenced blocks, links and commands of Markdown files."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block and the line on which its content begins."""

    language: str
    text: str
    line: int


def blocks_of(text: str, language: str) -> list[Block]:
    """The fenced blocks in one language.

    >>> blocks_of("```python\\nx = 1\\n```\\n", "python")
    [Block(language='python', text='x = 1\\n', line=2)]
    """
    found = [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]
    return [block for block in found if block.language == language]


def links_of(text: str) -> list[str]:
    """The targets of links to other files; those to the web and to places on the page are left out."""
    prose = _FENCE.sub("", text)
    targets = (target.partition("#")[0] for target in _LINK.findall(prose))
    return [target for target in targets if target and not target.startswith(("http://", "https://", "mailto:"))]


def commands_of(text: str) -> list[str]:
    """What is typed in `console` blocks: the lines that begin with a dollar sign."""
    lines = [line for block in blocks_of(text, "console") for line in block.text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def find_dead_links(file: Path) -> list[str]:
    return [link for link in links_of(file.read_text(encoding="utf-8")) if not (file.parent / link).exists()]
