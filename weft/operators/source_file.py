"""A user's file of operators."""

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path

from weft.errors import UsageError
from weft.operators.operator import Operator

__all__ = ["load_operators"]


def load_operators(path: Path) -> list[Operator]:
    """The operators that stand at the top level of a Python file, in its order; the file is run for that.

    Raises:
        UsageError: there is no such file, or no operator in it.
    """
    if not path.is_file():
        raise UsageError(f"no such file ({path}); give the path from the current folder")
    name = f"weft_operators_{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"not a Python file ({path}); give one whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    found = dict.fromkeys(id(value) for value in vars(module).values() if isinstance(value, Operator))
    operators = [next(v for v in vars(module).values() if id(v) == key) for key in found]
    if not operators:
        raise UsageError(f"no operators in the file ({path}); write name = operator(Class) or cpp_operator(...)")
    return operators
