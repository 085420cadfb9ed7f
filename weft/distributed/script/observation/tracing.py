"""The trace of a script's first steps on one rank, for `weft prove`: written to a file, and the script is ended.

request.json          written by who asks: steps, seed, and what is to be changed in the script (an experiment)
rank-R.safetensors    STEP/NAME            parameters after every update (step 0: before the first)
                      STEP/gradient NAME   the gradient that the update was made with
                      first/NAME           this rank's own gradient, of the first backward alone
rank-R.json           facts: what the models were given, and whether random numbers were drawn
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.atomic import write_json
from weft.distributed.script.observation.events import (
    BackwardEnded,
    BatchTaken,
    ForwardBegan,
    GradientReady,
    ScriptEnded,
    ScriptEvent,
    UpdateBegan,
    UpdateEnded,
    Woven,
    num_rows,
)
from weft.distributed.script.observation.no_randomness import turn_off_dropout, use_no_randomness
from weft.distributed.script.observation.supervision import Supervision, seed_generators, supervision_variables

__all__ = ["Counted", "Facts", "StepsDoneError", "TraceRequest", "Tracer", "count_targets", "counts_of", "supervise"]

PADDING = (-100, 0, -1)
"""Numbers that usually stand for no target: of torch's cross entropy, and of tokenizers."""


class StepsDoneError(SystemExit):
    """The script has taken the steps that were asked for; it ends as by sys.exit()."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Counted:
    """A way to count the targets of a batch: of its tensor number `tensor`, the elements that are not `padding`; all of
    them, or the sum of them (a mask), where there is no padding."""

    tensor: int
    padding: int | None = None
    is_mask: bool = False
    is_shifted: bool = False  # without the first column: the next token is the target

    def __str__(self) -> str:
        what = f"tensor {self.tensor} of the batch"
        if self.is_mask:
            return f"sum of {what}"
        kept = "elements" if self.padding is None else f"elements that are not {self.padding}"
        return f"{kept} of {what}{' but for its first column' if self.is_shifted else ''}"


def count_targets(batch: Any, how: Counted) -> int:
    """The targets in a batch, in one way to count them.

    >>> count_targets((torch.zeros(2, 2), torch.tensor([[3, -100], [4, 5]])), Counted(1, padding=-100))
    3
    """
    tensor = _tensors(batch)[how.tensor]
    if how.is_mask:
        return int(tensor.sum())
    tensor = tensor[:, 1:] if how.is_shifted else tensor
    return tensor.numel() if how.padding is None else int((tensor != how.padding).sum())


def counts_of(batch: Any) -> dict[Counted, int]:
    """Every way to count the targets of a batch that makes sense for its tensors."""
    ways = []
    for number, tensor in enumerate(_tensors(batch)):
        if tensor.dtype is torch.bool or (tensor.dim() > 1 and set(tensor.unique().tolist()) <= {0, 1}):
            ways.append(Counted(number, is_mask=True))
        elif not tensor.is_floating_point() and tensor.dim() > 0:
            shifts = (False, True) if tensor.dim() == 2 else (False,)
            ways += [Counted(number, padding, is_shifted=shift) for padding in (None, *PADDING) for shift in shifts]
    return {way: count_targets(batch, way) for way in ways}


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class TraceRequest:
    """Some steps of a script, as it is or with something changed.

    Args:
        folder: where the traces go.
        seed: of all generators when the script begins, so that one that does not set them begins the same twice.
        loss, batch_norm: in the place of what the script gives to `weave`; empty to leave it.
        counted: a weight for `weave`, as the number of targets in a batch.
        no_randomness: every random number is its mean.
    """

    folder: Path
    num_steps: int
    seed: int = 0
    loss: str = ""
    batch_norm: str = ""
    counted: Counted | None = None
    no_randomness: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "TraceRequest":
        counted = None if data["counted"] is None else Counted(**data["counted"])
        return TraceRequest(**{**data, "folder": Path(data["folder"]), "counted": counted})

    @property
    def variables(self) -> dict[str, str]:
        """The environment of ranks that are to be traced so."""
        return supervision_variables("weft.distributed.script.observation.tracing:supervise", **self.to_json())

    @property
    def changes(self) -> dict[str, Any]:
        """Arguments of `weave` that take the place of the script's."""
        given = {"loss": self.loss, "batch_norm": self.batch_norm}
        found: dict[str, Any] = {name: value for name, value in given.items() if value}
        if self.counted is not None:
            how = self.counted
            found["weight"] = lambda batch: count_targets(batch, how)
        return found


@dataclass
class Facts:
    """The observations on a rank beside its tensors; by step, where it is a list."""

    num_woven: int = 0
    plan: str = ""
    num_batches: int = 0  # that a woven loader or `weft.share` handed out
    has_batch_norm: bool = False
    inputs: list[str] = field(default_factory=list)  # a digest of what the models were given
    rows: list[int] = field(default_factory=list)
    weight: float = 1.0  # of the rank in the first backward
    random_states: list[str] = field(default_factory=list)  # digests, before the first forward
    model_draws: list[bool] = field(default_factory=list)  # whether random numbers were drawn from there to the update
    draws: list[bool] = field(default_factory=list)  # or since the update before, by a sampler maybe
    counts: list[tuple[dict[str, Any], int]] = field(default_factory=list)  # of the first batch


@final
class Tracer:
    """An observer that copies what it sees; `finish` writes it."""

    def __init__(self, request: TraceRequest, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._facts = Facts()
        self._tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._weight: Callable[[], float] = lambda: 1.0
        self._num_steps = 0
        self._is_first_backward = True
        self._is_written = False
        self._digest = hashlib.sha256()
        self._rows = 0
        self._random_state = ""  # before the first forward of a step
        self._last_random_state = _digest_of(torch.get_rng_state())

    def __call__(self, event: ScriptEvent) -> None:
        match event:
            case Woven():
                self._see_woven(event)
            case BatchTaken(batch):
                self._facts.num_batches += 1
                if self._facts.num_batches == 1:
                    self._facts.counts = [(asdict(way), number) for way, number in counts_of(batch).items()]
            case ForwardBegan(inputs):
                self._see_inputs(inputs)
            case GradientReady(name, gradient) if self._is_first_backward:
                self._facts.weight = self._weight()
                self._tensors[f"first/{name}"] = _copy(gradient)
            case BackwardEnded():
                self._is_first_backward = False
            case UpdateBegan():
                self._num_steps += 1
                self._keep("gradient ", lambda parameter: parameter.grad)
                now = _digest_of(torch.get_rng_state())
                self._facts.model_draws.append(self._random_state not in ("", now))
                self._facts.draws.append(self._last_random_state != now)
            case UpdateEnded():
                self._end_step()
            case ScriptEnded():
                self._write()
            case _:
                pass

    def _see_woven(self, woven: Woven) -> None:
        self._facts.num_woven += 1
        self._facts.plan = woven.plan
        self._weight = woven.weight
        self._parameters |= woven.parameters
        layers = [layer for model in woven.models for layer in model.modules()]
        self._facts.has_batch_norm |= any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)
        self._keep("", lambda parameter: parameter)
        if self._request.no_randomness:
            for model in woven.models:
                turn_off_dropout(model)
            if self._facts.num_woven == 1:
                use_no_randomness()

    def _see_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._random_state:
            self._random_state = _digest_of(torch.get_rng_state())
        for tensor in inputs:
            self._digest.update(_digest_of(tensor).encode())
        self._rows += num_rows(inputs)

    def _end_step(self) -> None:
        self._keep("", lambda parameter: parameter)
        facts = self._facts
        facts.inputs.append(self._digest.hexdigest())
        facts.rows.append(self._rows)
        facts.random_states.append(self._random_state)
        self._digest, self._rows, self._random_state = hashlib.sha256(), 0, ""
        self._last_random_state = _digest_of(torch.get_rng_state())
        if self._num_steps == self._request.num_steps:
            self._write()
            raise StepsDoneError

    def _keep(self, kind: str, take: Callable[[nn.Parameter], Tensor | None]) -> None:
        for name, parameter in self._parameters.items():
            tensor = take(parameter)
            if tensor is not None:
                self._tensors[f"{self._num_steps}/{kind}{name}"] = _copy(tensor)

    def _write(self) -> None:
        if self._is_written:
            return
        self._is_written = True
        save_file(self._tensors, self._request.folder / f"rank-{self._rank}.safetensors")
        write_json(self._request.folder / f"rank-{self._rank}.json", asdict(self._facts))


def _copy(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.to("cpu", copy=True).contiguous()


def _digest_of(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()


def supervise(rank: int, **request: Any) -> Supervision:
    """The supervision of a rank whose steps are traced; arguments are those of `TraceRequest.to_json`."""
    asked = TraceRequest.from_json(request)
    seed_generators(asked.seed)
    return Supervision((Tracer(asked, rank),), asked.changes, is_silent=True)
