"""Every exception that Weft raises on purpose.

WeftError                       a fact, its values, one cure; `exit_code` is what the command line returns
+-- UsageError (ValueError)     2: what was asked for cannot be done
|   +-- RecipeError             an unknown recipe, key, value or a wrong type
|   +-- PlanError               a plan that cannot be carried out
|   +-- DataNotFoundError       a data set that is not on this machine
|   +-- RunFolderError          a run folder that exists, is missing or is not one
|   +-- ComparisonError         two records that may not be compared
|   +-- GraphError              a step that cannot be captured, or a graph that is not valid
|   +-- OutOfStepError          ranks that made different calls, or built different models
+-- CompilerError               3: no C++ compiler, or a source that it refuses
+-- CorruptFileError            2: a data file, record or checkpoint that is not what it claims to be
+-- TrainingError (RuntimeError) 3: training started and could not go on
    +-- DivergedError           a loss or tensor that is not finite
    +-- EncodingError           a tensor that a codec cannot carry, or a message that it did not make
    +-- PeerLostError           a rank that died or fell silent
    +-- DeadlineError           nothing came in time, though nobody is known to be lost
    +-- RankFailedError         the first failure among the ranks, with its own traceback and exit code
    +-- StorageError            a file that could not be written (a full disk, a read-only folder)
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "ComparisonError",
    "CompilerError",
    "CorruptFileError",
    "DataNotFoundError",
    "DeadlineError",
    "DivergedError",
    "EncodingError",
    "GraphError",
    "OutOfStepError",
    "PeerLostError",
    "PlanError",
    "RankFailedError",
    "RecipeError",
    "RunFolderError",
    "StorageError",
    "TrainingError",
    "UsageError",
    "WeftError",
    "nearest",
]


class WeftError(Exception):
    """The root of the tree.

    `is_witness` of an error that tells of a failure of others, who know its cause better.
    """

    exit_code = 3
    is_witness = False


class UsageError(WeftError, ValueError):
    """A request that cannot be carried out."""

    exit_code = 2


class RecipeError(UsageError):
    """An unknown recipe, key or value, or a value of the wrong type."""


class PlanError(UsageError):
    """A plan with an unknown word, a value that this version lacks, or a combination that makes no sense."""


class DataNotFoundError(UsageError):
    """A data set that is not on this machine; says where it was looked for."""


class RunFolderError(UsageError):
    """A run folder that exists already, is missing, or is not a run folder."""


class ComparisonError(UsageError):
    """Two records that may not be compared."""


class GraphError(UsageError):
    """A step that cannot be captured, with the line at fault, or a graph that is not valid."""


class OutOfStepError(UsageError):
    """Ranks of one script that did not do the same: the text tells what each of them did, and where. All of them raise
    it; where one failed by itself, that is the cause."""

    is_witness = True  # all ranks raise it; one that failed by itself knows better


class CompilerError(WeftError):
    """There is no C++ compiler, or it refuses a source; holds what it said."""


class CorruptFileError(WeftError):
    """A data file, record or checkpoint that is not what it claims to be."""

    exit_code = 2


class TrainingError(WeftError, RuntimeError):
    """Training started and could not go on."""

    exit_code = 3


class DivergedError(TrainingError):
    """A loss or tensor that is not finite; names the step and the first bad tensor."""


class EncodingError(TrainingError):
    """A value that a codec cannot carry; the text and `name` say in which tensor."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class PeerLostError(TrainingError):
    """A rank that died or fell silent; the text and `peer` name it."""

    is_witness = True

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class DeadlineError(TrainingError):
    """Nothing came in time, though nobody is known to be lost; the text and `peers` name who was waited for."""

    def __init__(self, text: str, peers: tuple[int, ...]) -> None:
        super().__init__(text)
        self.peers = peers


class RankFailedError(TrainingError):
    """The first failure among the ranks: the rank, its own traceback, and the exit code it would have had alone.

    Args:
        shown: what a user sees of the traceback, and a line for each other rank that failed by itself.
    """

    def __init__(self, text: str, rank: int, rank_traceback: str, exit_code: int, shown: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.rank_traceback = rank_traceback
        self.exit_code = exit_code
        self.shown = shown


class StorageError(TrainingError):
    """A file that could not be written."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The cure for a misspelt name, as a clause: `did you mean 'adam'?` or the list of what is known.

    >>> nearest("adm", ["sgd", "adam"])
    "did you mean 'adam'?"
    >>> nearest("zzz", ["sgd", "adam"])
    'known: adam, sgd'
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
