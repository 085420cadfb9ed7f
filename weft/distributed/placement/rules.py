"""Rules by hand: how layers with certain names are split, in the place of what a placement would choose.

    rules     (("features.*", "data"), ("classifier.*", "split"))      the first that fits a layer counts
    layer     classifier.3        "split"
              head                no rule: as the placement finds it

A glob that fits a layer fits all that is inside of it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.errors import PlanError, nearest

__all__ = ["NO_RULES", "Rules"]


@dataclass(frozen=True)
class Rules:
    """Globs of dotted names and words, in the order of precedence.

    >>> rules = Rules((("classifier", "split"), ("*", "data")))
    >>> rules.word_of("classifier.3"), rules.word_of("features.0")
    ('split', 'data')
    """

    rows: tuple[tuple[str, str], ...] = ()

    def word_of(self, name: str) -> str | None:
        """Of the layer with this name; None where there is no rule for it."""
        return next((word for glob, word in self.rows if _fits(glob, name)), None)

    def check_words(self, known: Mapping[str, Collection[str]]) -> None:
        """Refuse a word that no axis knows. Where no axis has rules, they are for other plans.

        Args:
            known: the words of each axis that is split.
        """
        words = sorted({word for of_axis in known.values() for word in of_axis})
        for glob, word in self.rows if known else ():
            if word not in words:
                raise PlanError(
                    f"unknown word of a rule ({glob}: {word}, axes: {', '.join(known)}); {nearest(word, words)}"
                )

    def check_names(self, word: str, names: Collection[str]) -> None:
        """Refuse a rule with this word that fits none of the layers that it can be for."""
        for glob, own in self.rows:
            if own == word and not any(_fits(glob, name) for name in names):
                raise PlanError(
                    f"no layer that could be split so has the name of a rule ({glob}: {word}); {nearest(glob, names)}"
                )


NO_RULES = Rules()


def _fits(glob: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), glob) for i in range(len(parts)))
