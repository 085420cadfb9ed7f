"""Checks of this machine, each with its cure."""

from weft.engines.environment.examination import check_environment, check_extras, is_fit
from weft.engines.environment.probe import Check

__all__ = ["Check", "check_environment", "check_extras", "is_fit"]
