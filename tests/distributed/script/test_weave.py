"""`weave`: a user's own loop gives on N ranks what it gives in one process."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.script.virtual_script import run_script
from tests.distributed.woven import Script, run_in_turn
from tests.processes.ranks import run_processes
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel, exchange
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.script.data.batch_share import BatchShare
from weft.distributed.script.weaving.gradients import Backward, GradientHooks
from weft.distributed.script.weaving.weave import weave
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError, UsageError
from weft.graph import State
from weft.secret import SECRET_VARIABLE, make_secret
from weft.training.sampling import share

Weights = dict[str, list[float]]


@pytest.fixture
def on_ranks() -> "OnRanks":
    return run_script


OnRanks = Callable[[Callable[[], Any], int], list[Any]]


# ---- one process


def test_one_process_gets_the_very_same_objects() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), 2)
    woven = weave(model, optimizer, loader, plan="data")
    assert woven[0] is model and woven[1] is optimizer
    assert not model.weight._post_accumulate_grad_hooks and not model.weight._backward_hooks
    assert "step" not in vars(optimizer)


# ---- the same result

SCRIPTS = {
    "plain": Script(),
    "accumulation": Script(accumulate=2),
    "clipping": Script(clip_norm=0.05),
    "both": Script(accumulate=2, clip_norm=0.05),
    "two samples left for the last batch": Script(num_samples=18),
    "own generator": Script(has_generator=True),
    "ring": Script(plan="data topology=ring"),
    "sharded": Script(plan="shard"),
    "sharded, accumulation, clipping": Script(plan="shard", accumulate=2, clip_norm=0.05),
    "sharded, Adagrad, which has state from the start": Script(plan="shard", optimizer="Adagrad"),
}

LOSSY = {"bf16": 2**-6, "fp16": 2**-9}
"""How far weights may be off that were trained by rounded gradients."""


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_what_one_process_gives(script: Script, size: int, on_ranks: OnRanks) -> None:
    alone = Script(**{**vars(script), "plan": "data"}).run()
    results = on_ranks(script.run, size)
    assert all(result == results[0] for result in results)
    for name, values in alone.items():
        assert results[0][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("codec", LOSSY)
def test_compressed_gradients_train_nearly_the_same(codec: str, on_ranks: OnRanks) -> None:
    alone, results = Script().run(), on_ranks(Script(plan=f"data compress={codec}").run, 3)
    assert all(result == results[0] for result in results)
    assert results[0] != alone
    for name, values in alone.items():
        assert results[0][name] == pytest.approx(values, abs=LOSSY[codec]), name


@pytest.mark.parametrize("codec", [torch.bfloat16, torch.float16])
def test_gradients_are_the_decoded_means(codec: torch.dtype, on_ranks: OnRanks) -> None:
    """Of two ranks: q(q(g_0 / 2) + q(g_1 / 2)), the same bits on both."""
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def gradient_of(indices: Tensor, model: nn.Linear) -> Tensor:
        (found,) = torch.autograd.grad(nn.functional.mse_loss(model(x[indices]), y[indices]), [model.weight])
        return found

    def script() -> tuple[Tensor, Tensor]:
        model = nn.Linear(3, 1)
        nn.init.constant_(model.weight, 0.3)
        nn.init.constant_(model.bias, 0.1)
        shares = [share(torch.arange(8), rank, 2) for rank in range(2)]
        halves = [(gradient_of(indices, model) / 2).to(codec) for indices in shares]
        name = "bf16" if codec is torch.bfloat16 else "fp16"
        optimizer, loader = torch.optim.SGD(model.parameters()), DataLoader(TensorDataset(x, y), 8)
        model, _, loader = weave(model, optimizer, loader, plan=f"data=2 compress={name}")
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
        assert model.weight.grad is not None
        return model.weight.grad, (halves[0].float() + halves[1].float()).to(codec).float()

    for found, expected in on_ranks(script, 2):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_whole_numbers_are_met_exactly(size: int, accumulate: int, on_ranks: OnRanks) -> None:
    """Batches of 8 and a last one of 2, which leaves nothing for half of four ranks."""
    script = Script(num_samples=18, epochs=1, is_exact=True, accumulate=accumulate)
    assert on_ranks(script.run, size) == [script.run()] * size


def test_the_order_follows_a_generator_of_the_users_own(on_ranks: OnRanks) -> None:
    # Regression: the new loader drew from the global generator what the old one drew from the user's.
    script = Script(epochs=2, is_exact=True, has_generator=True, num_samples=12, batch_size=4)
    assert on_ranks(script.run, 2) == [script.run()] * 2


def test_a_frozen_and_an_unused_layer_stay_as_they_were(on_ranks: OnRanks) -> None:
    torch.manual_seed(4)
    before = Script(epochs=0).run()
    after = on_ranks(Script().run, 2)[0]
    for name in before:
        assert (before[name] == after[name]) == name.startswith(("frozen", "unused")), name


def test_ranks_begin_with_the_weights_and_buffers_of_rank_0(on_ranks: OnRanks) -> None:
    def script() -> list[float]:
        model = nn.BatchNorm1d(2)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().fill_(next(values))
        weave(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.zeros(4, 2)), 2))
        return [tensor.detach().sum().item() for tensor in (*model.parameters(), *model.buffers())]

    values = itertools.count(1)  # ranks begin in their order: rank 0 has 1 to 5
    assert on_ranks(script, 3) == [[2.0, 4.0, 6.0, 8.0, 5]] * 3


# ---- sharded state


def test_the_state_of_a_sharded_script_is_of_pieces(on_ranks: OnRanks) -> None:
    def script() -> tuple[int, int]:
        model = nn.Linear(64, 8)
        optimizer = torch.optim.Adam(model.parameters())
        weave(model, optimizer, DataLoader(TensorDataset(torch.zeros(4, 64)), 2), plan="shard=2")
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        moments = [state["exp_avg"].numel() for state in optimizer.state.values()]
        return sum(moments), sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])

    found = on_ranks(script, 2)
    assert [whole for _, whole in found] == [64 * 8 + 8] * 2  # outside of a step groups hold the model's parameters
    assert sum(own for own, _ in found) == 64 * 8 + 8
    assert max(own for own, _ in found) < 0.6 * (64 * 8 + 8)


def test_a_sharded_optimizer_refuses_its_state_dict_and_whole_tensors(on_ranks: OnRanks) -> None:
    def script() -> None:
        model = nn.Linear(4, 4)
        loader = DataLoader(TensorDataset(torch.zeros(4, 4)), 2)
        optimizer = torch.optim.Adam(model.parameters())
        weave(model, optimizer, loader, plan="shard")
        with pytest.raises(UsageError, match="lies in pieces on several ranks"):
            optimizer.state_dict()
        other = nn.Linear(4, 4)
        loader = DataLoader(TensorDataset(torch.zeros(4, 4)), 2)
        with pytest.raises(PlanError, match=r"may need whole tensors.*Adafactor"):
            weave(other, torch.optim.Adafactor(other.parameters()), loader, plan="shard")

    on_ranks(script, 2)


def adam_script(change: Callable[[nn.Module, torch.optim.Optimizer], None], plan: str) -> Callable[[], list[float]]:
    """Two steps of Adam, with a change between weaving and training; the weights in the end."""

    def script() -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(8, 40)), 4)
        model, optimizer, loader = weave(model, optimizer, loader, plan=plan)
        change(model, optimizer)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    return script


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The state of another optimizer that has taken a step."""
    other = torch.optim.Adam([parameter.detach().clone().requires_grad_() for parameter in model.parameters()], lr=0.1)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    optimizer.load_state_dict(other.state_dict())


def move_memory(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).clone(), model.parameters())


def fail_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step that raises before it changes anything, which the script survives."""
    optimizer.param_groups[0]["betas"] = None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)


@pytest.mark.parametrize("change", [load_state, move_memory, fail_once])
def test_what_a_script_does_to_a_sharded_optimizer_is_not_lost(change: Any, on_ranks: OnRanks) -> None:
    """Each of these once left the pieces behind without a word."""
    expected = on_ranks(adam_script(change, "data"), 2)[0]
    for found in on_ranks(adam_script(change, "shard"), 2):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_closure_under_shard_is_refused(on_ranks: OnRanks) -> None:
    def script() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weave(model, optimizer, DataLoader(TensorDataset(torch.zeros(4, 2)), 2), plan="shard")
        with pytest.raises(UsageError, match=r"closure would compute gradients.*call backward before step"):
            optimizer.step(lambda: 0.0)

    on_ranks(script, 2)


# ---- real processes


@pytest.mark.slow
def test_two_processes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers and with two that fetch ahead, in one process: every call of weave meets anew."""
    both: dict[str, object] = {"accumulate": 2, "clip_norm": 0.05}
    scripts: list[dict[str, object]] = [
        {**both, "num_workers": 0},
        {**both, "num_workers": 2},
        {"is_exact": True, "epochs": 1},
        {"plan": "shard", "clip_norm": 0.05, "optimizer": "AdamW"},
        {"plan": "data consistency=local(2)", "optimizer": "AdamW"},
        {"plan": "data consistency=async topology=server(2)", "optimizer": "AdamW"},
    ]
    monkeypatch.setenv(SECRET_VARIABLE, make_secret().hex())
    alone = run_in_turn(scripts)
    first, second = run_processes("tests.distributed.woven:run_in_turn", 2, scripts=scripts)
    assert first == second
    for found, wanted in zip(first[:-2], alone, strict=False):
        for name, values in wanted.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


# ---- hooks


class Sum(nn.Module):
    """a + b: autograd hands the memory of one gradient to both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(6))
        self.b = nn.Parameter(torch.ones(6))

    def forward(self) -> Tensor:
        return self.a.unsqueeze(0) + self.b.unsqueeze(0)


def hook(group: AbstractGroup, model: nn.Module, weight: float) -> GradientHooks:
    share, parameters = BatchShare(group.size), dict[str, Tensor](model.named_parameters())
    share.weight = weight
    replicas = DataParallel(group)
    replicas.join(State(parameters, {}, torch.empty(0)))
    return GradientHooks(parameters, replicas.exchange, Backward(list(parameters.values()), share, group.size))


def test_two_gradients_in_one_piece_of_memory_are_averaged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Regression: large gradients are averaged in place, and these were averaged twice.
    monkeypatch.setattr(exchange, "plan_buckets", lambda parameters, **options: plan_buckets(parameters, 1, **options))
    plain = Sum()
    plain().square().sum().backward()
    assert plain.a.grad is not None and plain.b.grad is not None
    assert plain.a.grad.data_ptr() == plain.b.grad.data_ptr()

    def program(group: AbstractGroup) -> tuple[list[float], list[float]]:
        model = Sum()
        hook(group, model, [0.5, 0.25, 0.25][group.rank])
        (model().square().sum() * (1 + group.rank)).backward()
        assert model.a.grad is not None and model.b.grad is not None
        return model.a.grad.tolist(), model.b.grad.tolist()

    expected = [4.0 * (0.5 * 1 + 0.25 * 2 + 0.25 * 3)] * 6
    assert run_virtual(program, 3).results == ((expected, expected),) * 3


def test_what_was_accumulated_before_counts_where_another_rank_adds_to_it() -> None:
    # Regression: a rank that left a parameter out of its second backward sent zeros for what the first had left there.
    def program(group: AbstractGroup) -> tuple[list[float], list[float]]:
        model = Sum()
        hook(group, model, 0.5)
        (model.a.sum() * 4 + model.b.sum() * 8).backward()
        second = model.a.sum() * 2
        (second + model.b.sum() * 16 if group.rank == 1 else second).backward()
        assert model.a.grad is not None and model.b.grad is not None
        return model.a.grad.tolist(), model.b.grad.tolist()

    assert run_virtual(program, 2).results == (([6.0] * 6, [16.0] * 6),) * 2


def test_a_parameter_that_only_another_rank_used_gets_its_gradient() -> None:
    def program(group: AbstractGroup) -> list[float] | None:
        model = Sum()
        hook(group, model, 0.5)
        (model.a.sum() + model.b.sum() if group.rank == 1 else model.a.sum()).backward()
        return None if model.b.grad is None else model.b.grad.tolist()

    assert run_virtual(program, 2).results == ([0.5] * 6, [0.5] * 6)


def test_a_gradient_kept_by_the_user_is_not_written_to_by_the_next_step() -> None:
    """Averages arrive in buffers that are used again: what a parameter holds must not be one of them."""

    def program(group: AbstractGroup) -> bool:
        model = Sum()
        hook(group, model, 0.5)
        (model.a.sum() if group.rank == 1 else model.b.sum()).backward()
        kept = [model.a.grad, model.b.grad]
        copies = [gradient.clone() for gradient in kept if gradient is not None]
        model.zero_grad()
        (model.a.sum() * 100 + model.b.sum()).backward()
        return all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True) if a is not None)

    assert run_virtual(program, 2).results == (True, True)


# ---- the end of an epoch


def test_running_statistics_are_the_mean_of_all_ranks_after_an_epoch(on_ranks: OnRanks) -> None:
    def script() -> tuple[list[float], list[float], int]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(1)
        model = nn.Sequential(norm, nn.Linear(1, 1))
        loader = DataLoader(TensorDataset(torch.arange(8.0).unsqueeze(1)), 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = weave(model, optimizer, loader, plan="data")
        own: list[float] = []
        buffers = dict(norm.named_buffers())
        for (x,) in loader:
            model(x).sum().backward()
            own = buffers["running_mean"].tolist()
        return own, buffers["running_mean"].tolist(), int(buffers["num_batches_tracked"])

    (own0, mean0, count0), (own1, mean1, count1) = on_ranks(script, 2)
    assert own0 != own1
    assert mean0 == mean1 == [(own0[0] + own1[0]) / 2]
    assert count0 == count1 == 2


# ---- what is refused


@pytest.mark.parametrize(
    ("plan", "size", "text"),
    [
        ("data=3", 2, r"plan: 3, ranks: 2.*plan='data'"),
        ("data=2", 1, r"plan: 2, ranks: 1"),
        ("topology=ring", 2, "plan: 1, ranks: 2"),
        ("data topology=neighbours", 2, "not available in this version"),
        ("dta", 2, "did you mean 'data'"),
    ],
)
def test_a_wrong_plan_is_refused(plan: str, size: int, text: str, on_ranks: OnRanks) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4)), 2)
    with pytest.raises(PlanError, match=text):
        on_ranks(lambda: weave(model, optimizer, loader, plan=plan), size)


def test_a_model_on_several_devices_is_refused(on_ranks: OnRanks) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), 2)
    assert weave(model, optimizer, loader)[0] is model  # in one process it is the user's affair
    with pytest.raises(UsageError, match=r"several devices \(cpu, meta\); move it to one"):
        on_ranks(lambda: weave(model, optimizer, loader, plan="data"), 2)


def test_a_sparse_gradient_is_refused_by_name(on_ranks: OnRanks) -> None:
    def script() -> None:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = weave(model, optimizer, DataLoader(TensorDataset(torch.arange(4)), 4), plan="data")
        for (x,) in loader:
            model(x).sum().backward()

    with pytest.raises(UsageError, match=r"not dense \(0.weight.*sparse=False"):
        on_ranks(script, 2)
