"""`save` and `load` of a script's state, on one rank and on several."""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import weft
from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.saving.saving import load, read_state_dict, save, state_dict
from weft.distributed.script.weaving.weave import weave
from weft.errors import CorruptFileError, OutOfStepError, StorageError, UsageError


@pytest.fixture(autouse=True)
def random_is_left_alone() -> Iterator[None]:
    """A load moves the generators of the process, which the tests after it share."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps whose gradients are known beforehand, so that one process and ranks that take the same agree to the bit."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_same(one: Any, other: Any) -> None:
    """To the last bit, in tensors and in all else."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other) and len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            check_same(mine, theirs)
    else:
        assert one == other


# ---- one process

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
} | {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
    "two groups": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    ends = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        train(model, optimizer, range(3))
        if is_interrupted:
            save(tmp_path / "c", model=model, optimizer=optimizer)
            model = nn.Linear(4, 3)
            optimizer = OPTIMIZERS[kind](list(model.parameters()))
            load(tmp_path / "c", model=model, optimizer=optimizer)
        train(model, optimizer, range(3, 6))
        ends.append([copy_of(model), optimizer.state_dict()])
    check_same(*ends)


def test_closures_go_on_to_the_same_bits(tmp_path: Path) -> None:
    ends = []
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def loss(model: nn.Module = model) -> Tensor:
            model.zero_grad()
            value: Tensor = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            value.backward()
            return value

        optimizer.step(loss)
        if is_interrupted:
            save(tmp_path / "c", model=model, optimizer=optimizer)
            load(tmp_path / "c", model=model, optimizer=optimizer)
        optimizer.step(loss)
        ends.append(copy_of(model))
    check_same(*ends)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, 10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, 3, cycle_momentum=False),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "Warm": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "Chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on(tmp_path: Path, kind: str) -> None:
    rates = []
    for is_interrupted in (False, True):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
        scheduler = SCHEDULERS[kind](optimizer)
        optimizer.step()
        for _ in range(2):
            scheduler.step()
        if is_interrupted:
            save(tmp_path / "c", optimizer=optimizer, scheduler=scheduler)
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
            scheduler = SCHEDULERS[kind](optimizer)
            load(tmp_path / "c", optimizer=optimizer, scheduler=scheduler)
            optimizer.step()
        rates.append([(scheduler.step(), optimizer.param_groups[0]["lr"])[1] for _ in range(4)])
    assert rates[0] == rates[1]


def test_plateau_and_scaler_go_on(tmp_path: Path) -> None:
    _, optimizer = make()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    assert plateau.best == float("inf")
    save(tmp_path / "c", plateau=plateau, scaler=scaler)
    plateau.step(3.0)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    load(tmp_path / "c", plateau=plateau, scaler=other)
    assert plateau.best == float("inf") and other.get_scale() == 8.0


def test_plain_values_come_back(tmp_path: Path) -> None:
    values = {"epoch": 3, "best": float("-inf"), "name": "inf", "rows": [(1, 2.5), None], "mean": torch.arange(3)}
    save(tmp_path / "c", **values, options={"lr": 0.1, 7: True})
    check_same(load(tmp_path / "c"), {**values, "options": {"lr": 0.1, 7: True}})


def test_every_random_number_goes_on(tmp_path: Path) -> None:
    def draw() -> tuple[list[float], float, float, float]:
        return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), float(np.random.normal())

    draw()  # leaves the second half of a pair behind, in Python and in NumPy
    save(tmp_path / "c")
    first = [draw() for _ in range(3)]
    load(tmp_path / "c")
    assert [draw() for _ in range(3)] == first


def test_one_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    save(tmp_path / "c", model=model, optimizer=optimizer, epoch=1)
    other, _ = make(seed=1)
    assert load(tmp_path / "c", model=other) == {"epoch": 1}
    check_same(copy_of(other), copy_of(model))
    check_same(read_state_dict(tmp_path / "c", "optimizer"), optimizer.state_dict())


# ---- errors


def test_what_does_not_fit_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "c", model=nn.Linear(2, 3), epoch=1)
    wider, other = nn.Linear(2, 4), nn.Sequential(nn.Linear(2, 3))
    for model, text in (
        (wider, r"model\.weight, checkpoint: \(3, 2\), model: \(4, 2\)"),
        (other, r"has model\.weight"),
    ):
        before = copy_of(model)
        with pytest.raises(UsageError, match=text):
            load(tmp_path / "c", model=model)
        check_same(copy_of(model), before)
    with pytest.raises(UsageError, match=r"no such part \(modle.*did you mean 'model'"):
        load(tmp_path / "c", modle=nn.Linear(2, 3))
    with pytest.raises(UsageError, match="saved as a plain value"):
        load(tmp_path / "c", epoch=nn.Linear(2, 3))
    with pytest.raises(UsageError, match=r"cannot be loaded into \(epoch: int\)"):
        load(tmp_path / "c", epoch=0)
    with pytest.raises(UsageError, match="there is no checkpoint"):
        load(tmp_path / "nothing", model=wider)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"log\['fn'\]: builtin_function"):
        save(tmp_path / "c", log={"fn": len})
    with pytest.raises(UsageError, match="the one that weave returned"):
        save(tmp_path / "c", loader=DataLoader([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="name of a part"):
        save(tmp_path / "c", weft=1)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="path is a file"):
        save(tmp_path / "file", epoch=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_of_a_recipe_is_told_apart(tmp_path: Path) -> None:
    from weft.training.checkpoint import Snapshot, write_checkpoint

    write_checkpoint(tmp_path, Snapshot(1, {}))
    with pytest.raises(UsageError, match="weft run --resume"):
        load(tmp_path)


# ---- the path


def test_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    for epoch in range(4):
        save(tmp_path / "c", epoch=epoch)
    assert load(tmp_path / "c") == {"epoch": 3}
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-0000000003", "step-0000000004"]


def test_damage_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for epoch in range(2):
        save(tmp_path / "c", model=nn.Linear(2, 2), epoch=epoch)
    (file,) = (tmp_path / "c" / "step-0000000002").glob("rank-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="checksum differs.*the checkpoint before it is taken"):
        assert load(tmp_path / "c", model=nn.Linear(2, 2)) == {"epoch": 0}
    (tmp_path / "c" / "step-0000000001" / "index.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="no checkpoint is whole"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(tmp_path / "c", model=nn.Linear(2, 2))


def test_a_disk_that_is_full_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.training.checkpoint import writing

    save(tmp_path / "c", model=nn.Linear(2, 2))
    right = writing.save_file  # type: ignore[attr-defined]

    def full(tensors: dict[str, Tensor], file: Path) -> None:
        if file.name.startswith("rank-00001"):
            raise OSError(28, "No space left on device")
        right(tensors, file)

    def script() -> str:
        with pytest.raises(StorageError, match="No space left") as found:
            save(tmp_path / "c", model=nn.Linear(2, 2), rank=weft_rank())
        return str(found.value)

    monkeypatch.setattr(writing, "save_file", full)
    assert len(set(run_script(script, 3))) == 1
    assert load(tmp_path / "c") == {} and len(list((tmp_path / "c").iterdir())) == 1


def weft_rank() -> int:
    from weft.distributed.script.world.world import find_world

    return find_world().rank


# ---- many ranks


def test_ranks_get_their_own_back_where_they_are_as_many(tmp_path: Path) -> None:
    def saving() -> None:
        save(tmp_path / "c", own=weft_rank(), same=7, tensors=[torch.full((weft_rank() + 1,), weft_rank())])

    def loading() -> tuple[Any, ...]:
        found = load(tmp_path / "c")
        return found["own"], found["same"], found["tensors"][0].tolist()

    run_script(saving, 3)
    assert run_script(loading, 3) == [(0, 7, [0]), (1, 7, [1, 1]), (2, 7, [2, 2, 2])]
    assert run_script(loading, 2) == [(0, 7, [0])] * 2 and loading() == (0, 7, [0])


def test_random_streams_go_on_for_as_many_and_begin_apart_for_others(tmp_path: Path) -> None:
    def saving() -> float:
        torch.manual_seed(weft_rank())
        save(tmp_path / "c")
        return torch.rand(1).item()

    def loading() -> float:
        load(tmp_path / "c")
        return torch.rand(1).item()

    drawn = run_script(saving, 2)
    assert run_script(loading, 2) == drawn
    others = run_script(loading, 4)
    assert others[0] == drawn[0] == loading() and len(set(others)) == 4
    assert others == run_script(loading, 4)


def test_ranks_that_save_different_things_are_told_apart(tmp_path: Path) -> None:
    def script() -> None:
        save(tmp_path / "c", **({"a": 1} if weft_rank() else {"b": 1}))

    with pytest.raises(OutOfStepError, match="parts"):
        run_script(script, 2)


def woven_script(
    plan: str, steps: range, *, source: Path | None = None, target: Path | None = None, differs: bool = False
) -> Callable[[], dict[str, Tensor]]:
    """Go on from a checkpoint if there is one, train, and save.

    Args:
        differs: whether ranks take different gradients.
    """

    def script() -> dict[str, Tensor]:
        model, optimizer, _ = weave(*make(), None, plan)
        if source:
            load(source, model=model, optimizer=optimizer)
        train(
            model, optimizer, range(steps.start + 10 * weft_rank(), steps.stop + 10 * weft_rank()) if differs else steps
        )
        if target:
            save(target, model=model, optimizer=optimizer, rank=weft_rank())
        return copy_of(model)

    return script


def one_process(steps: range) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize(("before", "size"), [("data", 2), ("shard", 2), ("shard", 4)])
@pytest.mark.parametrize(("after", "new_size"), [("shard", 2), ("shard", 4), ("data", 4)])
def test_any_plan_goes_on_from_any_other(tmp_path: Path, before: str, size: int, after: str, new_size: int) -> None:
    run_script(woven_script(before, range(3), target=tmp_path / "a"), size)
    ends = run_script(woven_script(after, range(3, 5), source=tmp_path / "a", target=tmp_path / "b"), new_size)
    model, optimizer = one_process(range(5))
    for end in ends:
        check_same(end, copy_of(model))
    check_same(read_state_dict(tmp_path / "b", "model"), copy_of(model))
    check_same(read_state_dict(tmp_path / "b", "optimizer"), optimizer.state_dict())
    assert load(tmp_path / "b") == {"rank": 0}


def test_one_process_goes_on_from_shards_and_back(tmp_path: Path) -> None:
    run_script(woven_script("shard", range(3), target=tmp_path / "a"), 2)
    model, optimizer = make(seed=3)
    load(tmp_path / "a", model=model, optimizer=optimizer)
    train(model, optimizer, range(3, 4))
    save(tmp_path / "b", model=model, optimizer=optimizer)
    ends = run_script(woven_script("shard", range(4, 5), source=tmp_path / "b"), 2)
    check_same(ends[1], copy_of(one_process(range(5))[0]))


def test_pieces_are_written_once_and_by_those_who_have_them(tmp_path: Path) -> None:
    from weft.training.checkpoint.index import read_index

    run_script(woven_script("shard", range(1), target=tmp_path / "c"), 2)
    rows = read_index(tmp_path / "c" / "step-0000000001").rows
    cut = [row for name, row in rows.items() if name.endswith("exp_avg") and len(row.tensors[0].chunks) == 2]
    assert len(cut) == 1 and {row.kind for name, row in rows.items() if name.startswith("optimizer/")} == {"global"}


def test_statistics_that_differ_become_their_mean_for_another_number(tmp_path: Path) -> None:
    def script(source: Path | None) -> Callable[[], float]:
        def run() -> float:
            model, optimizer = make()
            weave(model, optimizer)
            mean = model.state_dict()["1.running_mean"]
            if source:
                load(source, model=model)
            else:
                mean += weft_rank()
                save(tmp_path / "c", model=model)
                assert state_dict(model)["1.running_mean"][0] == 1
                assert mean[0] == weft_rank()  # to look at it is not to train
            return float(mean[0])

        return run

    run_script(script(None), 3)
    assert run_script(script(tmp_path / "c"), 3) == [0, 1, 2]
    assert run_script(script(tmp_path / "c"), 2) == [1, 1]
    assert read_state_dict(tmp_path / "c")["1.running_mean"][0] == 1


@pytest.mark.parametrize(
    "plan", ["data consistency=local(3)", "data consistency=elastic(3)", "data consistency=gossip"]
)
def test_relaxed_ranks_go_on_exactly_and_others_from_what_all_stand_for(tmp_path: Path, plan: str) -> None:
    whole = run_script(woven_script(plan, range(5), differs=True), 2)
    own = run_script(woven_script(plan, range(2), target=tmp_path / "c", differs=True), 2)
    assert not torch.equal(own[0]["0.weight"], own[1]["0.weight"])
    check_same(run_script(woven_script(plan, range(2, 5), source=tmp_path / "c", differs=True), 2), whole)
    agreed = read_state_dict(tmp_path / "c")
    for size, other in ((2, "data"), (3, plan), (2, "data consistency=local(8)")):
        for end in run_script(woven_script(other, range(0), source=tmp_path / "c"), size):
            check_same(end, agreed)


@pytest.mark.parametrize(
    "plan", ["data topology=server", "data compress=bf16", "data consistency=local(3) compress=bf16"]
)
def test_what_a_plan_remembers_goes_on(tmp_path: Path, plan: str) -> None:
    whole = run_script(woven_script(plan, range(6), differs=True), 2, plan)
    run_script(woven_script(plan, range(3), target=tmp_path / "c", differs=True), 2, plan)
    check_same(run_script(woven_script(plan, range(3, 6), source=tmp_path / "c", differs=True), 2, plan), whole)


def test_several_models_and_optimizers_go_by_any_names(tmp_path: Path) -> None:
    def script(steps: range, *, is_first: bool) -> Callable[[], Any]:
        def run() -> Any:
            pairs = [make(), make(1)]
            (one, two), (first, second), _ = weave([m for m, _ in pairs], [o for _, o in pairs])
            parts = {"net_d": one, "net_g": two, "opt_d": first, "opt_g": second}
            if not is_first:
                load(tmp_path / "c", **parts)
            train(one, first, steps)
            train(two, second, steps)
            if is_first:
                save(tmp_path / "c", **parts)
            return copy_of(one), copy_of(two)

        return run

    run_script(script(range(2), is_first=True), 2)
    ends = run_script(script(range(2, 4), is_first=False), 4)
    for seed, end in enumerate(ends[3]):
        model, optimizer = make(seed)
        train(model, optimizer, range(4))
        check_same(end, copy_of(model))


def test_optimizers_of_relaxed_ranks_keep_their_own_or_take_the_mean(tmp_path: Path) -> None:
    def script(source: Path | None = None, plan: str = "data consistency=local(4)") -> Callable[[], float]:
        def run() -> float:
            model, optimizer = make()
            weave(model, optimizer, None, plan)
            if source:
                load(source, model=model, optimizer=optimizer)
            else:
                train(model, optimizer, range(weft_rank(), weft_rank() + 1))
                save(tmp_path / "c", model=model, optimizer=optimizer)
            return float(optimizer.state[next(model.parameters())]["exp_avg"][0, 0])

        return run

    own = run_script(script(), 2)
    assert own[0] != own[1] and run_script(script(tmp_path / "c"), 2) == own
    mean = run_script(script(tmp_path / "c"), 3)
    assert mean == [pytest.approx(sum(own) / 2)] * 3
    assert run_script(script(tmp_path / "c", "data"), 2) == mean[:2]


RELAXED = ["data consistency=local(4)", "data consistency=elastic(4)", "data consistency=gossip"]
OTHERS = ["data topology=server", "data consistency=async topology=server", "data consistency=gossip(mix=pair)"]


@pytest.mark.parametrize("plan", ["data", "shard", *RELAXED, *OTHERS])
def test_a_plain_state_is_the_same_on_every_rank(tmp_path: Path, plan: str) -> None:
    def script() -> dict[str, Tensor]:
        model, optimizer, _ = weave(*make(), None)
        train(model, optimizer, range(weft_rank(), weft_rank() + 2))
        before = copy_of(model)
        save(tmp_path / "c", model=model)
        found = state_dict(model)
        check_same(copy_of(model), before)
        return found

    states = run_script(script, 2, plan)
    check_same(states[0], states[1])
    check_same(states[0], read_state_dict(tmp_path / "c"))


def test_a_plain_state_fits_a_plain_model(tmp_path: Path) -> None:
    model, other = make()[0], make(seed=1)[0]
    other.load_state_dict(weft.state_dict(model))
    check_same(copy_of(other), copy_of(model))


@pytest.mark.parametrize("plan", ["data", "shard"])
@pytest.mark.parametrize("other", OTHERS)
def test_servers_and_pairs_hand_over_and_take_over(tmp_path: Path, plan: str, other: str) -> None:
    def going_on() -> Any:
        model, optimizer, _ = weave(*make(seed=5), None)
        load(tmp_path / "a", model=model, optimizer=optimizer)
        save(tmp_path / "b", model=model, optimizer=optimizer)
        return copy_of(model)

    run_script(woven_script(plan, range(3), target=tmp_path / "a"), 2)
    for end in run_script(going_on, 2, other):
        check_same(end, read_state_dict(tmp_path / "a"))
    check_same(read_state_dict(tmp_path / "b", "optimizer"), read_state_dict(tmp_path / "a", "optimizer"))
    ends = run_script(woven_script(plan, range(3, 5), source=tmp_path / "b"), 2)
    check_same(ends, [copy_of(one_process(range(5))[0])] * 2)
