"""What works on this machine, and the cure for what does not."""

from weft.engines.environment.examination import check_environment, check_extras, is_fit
from weft.engines.environment.probe import Check

__all__ = ["Check", "check_environment", "check_extras", "is_fit"]
