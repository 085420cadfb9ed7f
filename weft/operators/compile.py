"""C++ compiled at first use by the machine's compiler, behind a plain C interface, and kept in a cache.

The key of the cache covers the sources, the flags, the compiler's version and the kind of processor, so that a library
is never used where it does not belong.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from weft.atomic import use_folder_lock
from weft.errors import CompilerError

__all__ = ["FLAGS", "compile_library", "find_compiler"]

# No contraction of a * b + c, and integers that wrap: the same bits as torch.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-pthread", "-shared", "-fPIC")


def compile_library(sources: Sequence[Path], *, flags: Sequence[str] = FLAGS, compiler: str | None = None) -> Path:
    """Compile a shared library, or find it in the cache. Several processes may ask at once.

    Args:
        sources: the first is compiled, the others are what it includes.
        compiler: by default that of `find_compiler`.

    Raises:
        CompilerError: there is no compiler, or it refuses the source; holds what it said.
    """
    compiler = compiler or find_compiler()
    key = _key([path.read_bytes() for path in sources], [*flags, _version(compiler), _processor()])
    library = cache_folder() / f"{sources[0].stem}-{key}.so"
    if not library.exists():
        with _use_turn(library.parent):
            if not library.exists():
                _build(compiler, sources[0], flags, library)
    return library


def find_compiler() -> str:
    """The path of a C++ compiler: the one that CXX names, or else g++, c++ or clang++.

    Raises:
        CompilerError: there is none, or WEFT_NO_COMPILER is set.
    """
    if os.environ.get("WEFT_NO_COMPILER", "0") not in ("", "0"):
        raise CompilerError("the compiler is switched off (WEFT_NO_COMPILER is set); unset it to compile")
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "c++", "clang++"]
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompilerError(f"no C++ compiler was found (looked for: {', '.join(names)}); install g++ or set CXX")


def cache_folder() -> Path:
    """Weft's folder in the user's cache, for libraries and generated code: below XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "weft"


@contextmanager
def _use_turn(folder: Path) -> Iterator[None]:
    """One process compiles while the others that want the same wait for it. Where there are no locks, all compile."""
    with ExitStack() as stack:
        with suppress(OSError):  # the build will say why
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(use_folder_lock(folder))
        yield


def _build(compiler: str, source: Path, flags: Sequence[str], library: Path) -> None:
    """Build beside the target, then rename: a process that comes second finds all of it or nothing."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
            fresh = Path(folder) / library.name
            done = subprocess.run(
                [compiler, *flags, "-o", str(fresh), str(source)], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise CompilerError(f"the compiler refused {source} (compiler: {compiler})\n{done.stderr.strip()}")
            os.replace(fresh, library)
    except OSError as error:
        raise CompilerError(
            f"the compiled library could not be kept ({library}: {error.strerror}); "
            "set XDG_CACHE_HOME to a writable folder"
        ) from error


def _key(sources: Sequence[bytes], settings: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in [*sources, *(setting.encode() for setting in settings)]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


@cache
def _processor() -> str:
    """The processor, on which -march=native depends: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
