"""Checks of a model's task and options."""

from weft.errors import RecipeError
from weft.specs import TaskSpec

__all__ = ["check_dropout", "check_image_task", "check_positive", "check_token_task"]


def check_image_task(task: TaskSpec, model: str, *, least: int = 1) -> None:
    """Inputs must be floating point (channels, height, width), no side shorter than `least`."""
    shape = task.input.shape
    if len(shape) != 3 or not task.input.dtype.is_floating_point or min(shape[1:]) < least:
        wanted = f"(channels, height, width) of at least {least} x {least}"
        raise RecipeError(f"{model} takes images {wanted} (input: {_describe(task)}); choose another model or data")


def check_token_task(task: TaskSpec, model: str) -> None:
    """Inputs must be sequences of integer tokens."""
    if len(task.input.shape) != 1 or task.input.dtype.is_floating_point:
        raise RecipeError(f"{model} takes sequences of tokens (input: {_describe(task)}); choose another model or data")


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise RecipeError(f"model option must be positive ({name}: {value}); --set model.{name}=1")


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise RecipeError(f"dropout is a share (dropout: {dropout}); give 0 <= dropout < 1")


def _describe(task: TaskSpec) -> str:
    return f"{str(task.input.dtype).removeprefix('torch.')} {task.input.shape}"
