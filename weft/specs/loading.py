"""Objects by import path, as tables name them."""

import importlib
from typing import Any

__all__ = ["load"]


def load(path: str) -> Any:
    """The object that `module:name` names.

    >>> load("math:floor")(2.5)
    2
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
