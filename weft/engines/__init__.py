"""Where ranks run, and what works on this machine."""

from weft.engines.environment import Check, check_environment, check_extras, is_fit

__all__ = ["Check", "check_environment", "check_extras", "is_fit"]
