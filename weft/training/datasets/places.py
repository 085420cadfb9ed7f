"""Where data files are looked for, and what to do when they are not there."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import DataNotFoundError

__all__ = ["Availability", "FileSet", "cache_folder", "find_user_file", "find_user_folder"]


@dataclass(frozen=True)
class Availability:
    """Whether a data set is on this machine: where it is, or else the one cure."""

    name: str
    found: bool
    where: str
    cure: str = ""


@dataclass(frozen=True)
class FileSet:
    """Files that are found together in one folder, or not at all.

    Looked for under `$WEFT_DATA` (in each of `folders`, then in the folder itself), in `system`, and in the cache.
    """

    name: str
    files: tuple[str, ...]
    cure: str
    folders: tuple[str, ...] = ()  # names under which others unpack the same files
    system: tuple[str, ...] = ()  # absolute paths of distribution packages
    suffixes: tuple[str, ...] = ("",)

    def places(self) -> tuple[Path, ...]:
        names = (self.name, *self.folders)
        chosen = [root / name for root in _data_root() for name in (*names, "")]
        return (*chosen, *map(Path, self.system), *(cache_folder() / name for name in names))

    def find(self) -> Mapping[str, Path]:
        """The path of every file, from the first place that has them all."""
        for place in self.places():
            found = {file: path for file in self.files if (path := self._file_in(place, file))}
            if len(found) == len(self.files):
                return found
        raise self._not_found()

    def availability(self) -> Availability:
        try:
            return Availability(self.name, True, str(next(iter(self.find().values())).parent))
        except DataNotFoundError:
            return Availability(self.name, False, "not found", self.cure)

    def _file_in(self, place: Path, file: str) -> Path | None:
        return next((path for suffix in self.suffixes if (path := place / f"{file}{suffix}").is_file()), None)

    def _not_found(self) -> DataNotFoundError:
        looked = ", ".join(map(str, self.places()))
        unset = "" if _data_root() else "; WEFT_DATA: not set"
        files = ", ".join(self.files)
        return DataNotFoundError(
            f"data set {self.name!r} is not on this machine (files: {files}; looked in: {looked}{unset}); {self.cure}"
        )


def cache_folder() -> Path:
    """Weft's folder in the user's cache: `~/.cache/weft`, or under `$XDG_CACHE_HOME`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "weft"


def find_user_file(name: str, path: str) -> Path:
    """The file that the user gave as the option `path`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataNotFoundError(
            f"data set {name!r} is not there (looked for: {file.absolute()}); set the option `path` to its file"
        )
    return file


def find_user_folder(name: str, path: str) -> Path:
    """The folder that the user gave as the option `path`."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataNotFoundError(
            f"data set {name!r} is not there (looked for: {folder.absolute()}); set the option `path` to its folder"
        )
    return folder


def _data_root() -> list[Path]:
    root = os.environ.get("WEFT_DATA")
    return [Path(root).expanduser()] if root else []
