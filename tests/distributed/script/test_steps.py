"""Plans whose steps are taken at `optimizer.step()`: at servers, and of a rank's own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.script.loops import apart, data_of, make_model, train
from tests.distributed.script.virtual_script import run_script
from tests.distributed.virtual_plan import run_plan
from tests.processes.ranks import run_processes
from weft.distributed.group import AbstractGroup
from weft.distributed.script.data.evaluation import evaluation
from weft.distributed.script.saving.saving import read_state_dict, save, state_dict
from weft.distributed.script.weaving.blocks import consensus
from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import find_world
from weft.errors import PlanError, UsageError
from weft.graph import State
from weft.secret import SECRET_VARIABLE, make_secret
from weft.training.optimizers import TorchOptimizer
from weft.training.replicas import AbstractReplicas, Update
from weft.training.sampling import share

SERVERS = ["data topology=server", "data topology=server(2)", "data consistency=stale(0) topology=server(2)"]

RELAXED = [
    "data consistency=local(2)",
    "data consistency=local(4,state=mean)",
    "data consistency=local(2,outer=nesterov)",
    "data consistency=local(2,after=3)",
    "data consistency=local(2) compress=bf16",
    "data consistency=elastic(2)",
    "data consistency=elastic(2) topology=server",
    "data consistency=gossip(ring)",
    "data consistency=gossip(ring,mix=after)",
    "data consistency=gossip(ring,mix=pair)",
    "data consistency=gossip(ring,lost=drop)",
    "data consistency=async topology=server(2)",
    "data consistency=async(push=difference) topology=server",
    "data consistency=async(parts=2) topology=server(2)",
    "data consistency=async topology=server(1,place=own)",
    "data consistency=async topology=server(1,inner=2)",
    "data consistency=async topology=server compress=bf16",
    "data consistency=stale(1) topology=server",
    "data consistency=stale(1,commit=arrival) topology=server",
    "data consistency=backup(1) topology=server",
]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


# ---- synchronous servers


@pytest.mark.parametrize("plan", SERVERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_groups_and_schedules_at_synchronous_servers_give_one_processs_result(plan: str, accumulate: int) -> None:
    """Three batches an epoch, of which the last is ragged: with accumulation shares differ within one step."""
    alone = train(accumulate=accumulate)
    found = run_script(partial(train, accumulate=accumulate), 3, plan)
    assert found[0] == found[1] == found[2]
    assert apart(found[0], alone) < 1e-6


def test_synchronous_servers_have_the_bits_of_an_all_reduce() -> None:
    assert run_script(train, 2, "data topology=server(2)") == run_script(train, 2, "data")


def test_settings_of_groups_reach_the_shards() -> None:
    # What a script changes on the way: not the learning rate alone, and not all groups alike.
    def change(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[1]["betas"] = (0.5, 0.99)
        optimizer.param_groups[0]["weight_decay"] = 0.1

    alone, unchanged = train(change=change), train()
    found = run_script(partial(train, change=change), 2, "data topology=server(2)")
    assert apart(found[0], alone) < 1e-6 < apart(alone, unchanged)


@pytest.mark.parametrize("kind", ["Adagrad", "Adafactor", "NAdam", "Rprop", "Muon"])
def test_any_optimizer_runs_at_servers(kind: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        own: torch.optim.Optimizer = getattr(torch.optim, kind)([p for p in model.parameters() if p.dim() > 1], lr=0.01)
        return own

    found = run_script(partial(train, optimizer=make), 2, "data topology=server(2)")
    assert apart(found[0], train(optimizer=make)) < 1e-6


def test_gradients_that_a_script_clips_are_refused_by_synchronous_servers() -> None:
    def clip(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with pytest.raises(UsageError, match=r"changed between backward and step \(0.weight\).*use topology=native"):
        run_script(partial(train, change=clip), 2, "data topology=server")


# ---- a rank's own steps


def loop_of_a_recipe(plan: str, size: int, num_batches: int) -> list[Any]:
    """The same batches and updates through replicas, without weave: on each rank its own weights, and the consensus."""
    data = data_of(8 * num_batches)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> tuple[list[float], list[float]]:
        model = make_model()
        state = State(dict(model.named_parameters()), {}, torch.empty(0))
        optimizer = TorchOptimizer(torch.optim.SGD, lr=0.1, momentum=0.5)
        replicas.join(state)
        slots = optimizer.init(state.parameters)
        for number in range(num_batches):
            own = share(torch.arange(8 * number, 8 * number + 8), replicas.mesh.rank, size)
            x, y = data[own]
            gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
            add = replicas.begin(len(own) / 8)
            for name, gradient in zip(state.parameters, gradients, strict=True):
                add(name, gradient)
            _, slots = replicas.finish(0.0, Update(optimizer, state.parameters, slots, 0.1, None))
        weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
        with replicas.use_consensus(state):
            return weights, nn.utils.parameters_to_vector(model.parameters()).tolist()

    return list(run_plan(plan.replace("data", f"data={size}"), work).results)


@pytest.mark.parametrize("plan", [*RELAXED[:6], *RELAXED[7:9]])
def test_a_woven_loop_has_the_bits_of_a_recipes(plan: str) -> None:
    """Own weights in the middle of an epoch, and the consensus after it."""

    def script() -> tuple[list[float], list[float]]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(40), 8))
        own: list[float] = []
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            own = nn.utils.parameters_to_vector(model.parameters()).tolist()
        return own, nn.utils.parameters_to_vector(model.parameters()).tolist()

    assert run_script(script, 3, plan) == loop_of_a_recipe(plan, 3, 5)


@pytest.mark.parametrize("plan", RELAXED)
def test_every_plan_trains_repeats_itself_and_ends_in_one_model(plan: str) -> None:
    first, again = run_script(train, 3, plan), run_script(train, 3, plan)
    assert first == again
    assert first[0] == first[1] == first[2]
    assert apart(first[0], nn.utils.parameters_to_vector(make_model().parameters()).tolist()) > 0.01


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_that_is_late_makes_as_many_steps_and_meets_the_others_in_between(accumulate: int) -> None:
    # Regression: it passed over batches, counted fewer steps, and was in another call than the others.
    def script() -> tuple[list[int], list[float]]:
        model, world, sizes = make_model(), find_world(), []
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(240), 12))
        for number, (x, y) in enumerate(loader, 1):
            world.group.clock.charge(0.1 * len(x) * (1 + 2 * (world.rank == 2)))
            sizes.append(len(x))
            nn.functional.mse_loss(model(x), y).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            if number % 6 == 0:
                with consensus():
                    pass
        assert weavings_of(world)[0].num_steps == 20 // accumulate
        return sizes, nn.utils.parameters_to_vector(model.parameters()).tolist()

    first, second, late = run_script(script, 3, "data consistency=backup(1) topology=server")
    assert first[1] == second[1] == late[1]
    assert first[0] == second[0] == [4] * 20
    assert len(late[0]) == 20 and set(late[0]) == {4, 2}


def test_own_weights_come_back_after_the_consensus() -> None:
    def script() -> tuple[bool, bool]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(24), 8))
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        own = weavings_of(find_world())[0].own_weights()["0.weight"].clone()
        held = model.state_dict()["0.weight"].clone()
        for _ in loader:
            back = model.state_dict()["0.weight"].clone()
            with consensus():
                inside = model.state_dict()["0.weight"].clone()
            break
        return torch.equal(own, back) and not torch.equal(own, held), torch.equal(inside, held)

    assert run_script(script, 2, "data consistency=gossip(ring)") == [(True, True)] * 2


def test_a_step_after_the_last_batch_is_one_of_own_weights_and_the_consensus_is_held_again() -> None:
    """What is left of an accumulation."""

    def script() -> tuple[list[float], list[float]]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(24), 8))
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
        before = nn.utils.parameters_to_vector(model.parameters()).tolist()
        optimizer.step()
        return before, nn.utils.parameters_to_vector(model.parameters()).tolist()

    (before, first), (_, second) = run_script(script, 2, "data consistency=local(8)")
    assert first == second != before


def test_a_batch_of_which_a_rank_has_nothing_counts_for_nothing() -> None:
    """17 samples in batches of 8 leave one for three ranks; synchronous servers have one process's result."""
    found = run_script(partial(train, num_samples=17), 3, "data topology=server")
    assert apart(found[0], train(num_samples=17)) < 1e-6


# ---- several models, closures, scalers


def adversaries() -> tuple[list[float], list[float]]:
    """Two models whose optimizers step in turn; the backward of one passes through the other."""
    torch.manual_seed(5)
    judge, maker = nn.Linear(5, 1), nn.Linear(5, 5)
    optimizers = [torch.optim.Adam(judge.parameters(), lr=0.01), torch.optim.SGD(maker.parameters(), lr=0.05)]
    (judge, maker), (of_judge, of_maker), loader = weave([judge, maker], optimizers, DataLoader(data_of(22), 8))
    for x, _ in loader:
        of_judge.zero_grad()
        judge(x).tanh().mean().backward()
        (-judge(maker(x).detach()).tanh().mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(maker(x)).tanh().mean().backward()
        of_maker.step()
    vectors = [nn.utils.parameters_to_vector(model.parameters()).tolist() for model in (judge, maker)]
    return vectors[0], vectors[1]


@pytest.mark.parametrize("plan", ["data", "shard", "data topology=server(2)"])
def test_two_models_and_optimizers_give_one_processs_result(plan: str) -> None:
    for found in run_script(adversaries, 2, plan):
        for vector, alone in zip(found, adversaries(), strict=True):
            assert apart(vector, alone) < 1e-6


@pytest.mark.parametrize(
    "plan", ["local(2)", "gossip(ring,mix=pair)", "async topology=server", "backup(1) topology=server"]
)
def test_two_models_and_optimizers_under_relaxed_plans(plan: str) -> None:
    found = run_script(adversaries, 3, f"data consistency={plan}")
    assert found[0] == found[1] == found[2]


def one_loss_for_two() -> list[float]:
    """One backward, after which two optimizers step in turn."""
    model = make_model()
    of_first, of_last = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    model, (of_first, of_last), loader = weave(model, [of_first, of_last], DataLoader(data_of(22), 8))
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        of_first.step()
        assert model[2].weight.grad.any()
        of_last.step()
        of_first.zero_grad()
        of_last.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("plan", ["data", "data topology=server(2)", "data consistency=local(2)"])
def test_one_loss_for_two_optimizers_gives_one_processs_result(plan: str) -> None:
    # Regression: the step of the first took the gradients of the second with it. By plain SGD, local(2) then is one
    # process's: all ranks meet after both steps.
    for found in run_script(one_loss_for_two, 2, plan):
        assert apart(found, one_loss_for_two()) < 1e-6


def test_one_loss_for_two_optimizers_at_servers_that_wait_for_nobody() -> None:
    begun = nn.utils.parameters_to_vector(make_model().parameters())
    for found in run_script(one_loss_for_two, 2, "data consistency=async topology=server"):
        first, last = (torch.tensor(found) - begun).abs().split([48, 9])
        assert first.sum() > 0.01 and last.sum() > 0.01


def test_steps_without_a_backward_leave_the_mean_of_local_ranks_where_it_is() -> None:
    # Regression: shares of such a step are 0 on all ranks, and the mean was scaled towards 0.
    def script() -> list[float]:
        model = make_model()
        model, optimizer, loader = weave(model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(data_of(24), 8))
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    begun = nn.utils.parameters_to_vector(make_model().parameters()).tolist()
    for found in run_script(script, 3, "data consistency=local(2)"):
        assert apart(found, begun) < 1e-6


@pytest.mark.parametrize("plan", ["data", "data topology=server", "data consistency=local(2)"])
def test_a_closure_is_called_and_its_loss_returned(plan: str) -> None:
    def script() -> list[float]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(16), 8))

        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss.item()

        losses = []
        for batch in loader:
            x, y = batch
            losses.append(float(optimizer.step(closure)))
        return losses

    first, second = run_script(script, 2, plan)
    assert (first == second) == ("local" not in plan)
    if "local" not in plan:
        assert apart(first, script()) < 1e-6


def test_a_closure_that_is_called_in_the_step_counts_with_the_share_of_its_batch() -> None:
    """One batch of 3 for two ranks: their mean is that of two thirds and one third."""

    def script() -> tuple[list[float], list[float]]:
        model = make_model()
        model, optimizer, loader = weave(
            model, torch.optim.LBFGS(model.parameters(), max_iter=2), DataLoader(data_of(3), 3)
        )

        def closure() -> Any:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        for batch in loader:
            x, y = batch
            optimizer.step(closure)
            own = nn.utils.parameters_to_vector(model.parameters()).tolist()
        return own, nn.utils.parameters_to_vector(model.parameters()).tolist()

    (first, mean), (second, _) = run_script(script, 2, "data consistency=local(4)")
    assert apart(first, second) > 1e-3
    assert apart(mean, [(2 * a + b) / 3 for a, b in zip(first, second, strict=True)]) < 1e-6


@pytest.mark.parametrize("plan", ["data", "data consistency=local(2)"])
def test_an_optimizer_that_evaluates_the_loss_itself(plan: str) -> None:
    """Synchronous ranks all see the loss of all, and go as far."""

    def script() -> list[float]:
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
        model, optimizer, loader = weave(model, optimizer, DataLoader(data_of(22), 11))

        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss.item()

        for batch in loader:
            x, y = batch
            optimizer.step(closure)
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    first, second = run_script(script, 2, plan)
    assert first == second
    if plan == "data":
        assert apart(first, script()) < 1e-4


def scaled(rank_of_overflow: int | None) -> Callable[[], list[float]]:
    """A gradient scaler, and in the second of four batches an overflow on one rank."""

    def script() -> list[float]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(32), 8))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss * torch.inf if (number, find_world().rank) == (1, rank_of_overflow) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    return script


def test_a_scaler_changes_nothing_and_an_overflow_is_skipped_by_all_synchronous_ranks() -> None:
    plan = "data topology=server"
    assert apart(run_script(scaled(None), 2, plan)[0], scaled(None)()) < 1e-6
    found = run_script(scaled(1), 2, plan)
    assert found[0] == found[1]
    assert apart(found[0], scaled(0)()) < 1e-6  # one process, which skips the second batch too


@pytest.mark.parametrize("plan", ["local(2)", "elastic(2)", "async topology=server"])
def test_a_rank_that_skips_a_step_still_meets_the_others(plan: str) -> None:
    # Regression: it was one step behind from then on, and took its mean with another of the others.
    found = run_script(scaled(1), 2, f"data consistency={plan}")
    assert found[0] == found[1] and all(map(torch.isfinite, torch.tensor(found[0])))


# ---- states


def test_the_state_that_servers_keep_is_in_the_optimizers_state_dict() -> None:
    states: list[dict[str, Any]] = []

    def note(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        states.append(optimizer.state_dict())

    train(epochs=1, after_epoch=note)
    run_script(partial(train, epochs=1, after_epoch=note), 2, "data topology=server(2)")
    alone, *served = states
    for state in served:
        assert state["param_groups"] == alone["param_groups"] and state["state"].keys() == alone["state"].keys()
        for index, slots in alone["state"].items():
            for key, value in slots.items():
                assert torch.allclose(state["state"][index][key], value, atol=1e-7), (index, key)


@pytest.mark.parametrize(
    "plan",
    [
        *SERVERS[:2],
        "data",
        "data consistency=elastic(2)",
        "data consistency=gossip(ring,mix=pair)",
        "data consistency=async topology=server",
    ],
)
def test_a_script_that_loads_its_state_after_weave_goes_on_from_it(plan: str) -> None:
    """Rank 0's counts, also at servers, which had begun with other weights."""
    saved = make_model().state_dict()

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict({name: tensor + find_world().rank for name, tensor in saved.items()})
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5).state_dict())

    def script() -> list[list[float]]:
        torch.manual_seed(99)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(16), 8))
        found = []
        for number in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            found.append(nn.utils.parameters_to_vector(model.parameters()).tolist())
            if number == 0:
                load(model, optimizer)
        return found

    first, second = run_script(script, 2, plan)
    assert first == second
    if not plan.startswith("data consistency"):
        assert apart(first[1], script()[1]) < 1e-6


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("plan", ["data", "shard", *SERVERS[1:], *RELAXED])
def test_weights_that_are_loaded_after_training_are_those_that_count(plan: str, is_held: bool, tmp_path: Path) -> None:
    """The best ones, say: for evaluation, state_dict and save, between epochs and after a loop that was left early."""

    def script() -> list[set[float]]:
        model: nn.Module = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(24), 8))
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if number == 1 and not is_held:
                break
        rank = find_world().rank
        model.load_state_dict({name: torch.full_like(its, 7.0 + rank) for name, its in model.state_dict().items()})
        found = []
        for _ in evaluation(DataLoader(data_of(8), 2)):
            found.append(nn.utils.parameters_to_vector(model.parameters()))
        with consensus():
            found.append(nn.utils.parameters_to_vector(model.parameters()))
        found += state_dict(model).values()
        save(tmp_path / "best", model=model)
        return [set(its.flatten().tolist()) for its in found]

    for found in run_script(script, 2, plan):
        assert all(its == {7.0} for its in found)
    assert all(set(its.flatten().tolist()) == {7.0} for its in read_state_dict(tmp_path / "best").values())


@pytest.mark.parametrize("plan", ["data topology=server", "data consistency=async topology=server", "data"])
def test_a_script_that_loads_one_part_of_a_model_goes_on_from_it(plan: str) -> None:
    def load(model: Any, _optimizer: torch.optim.Optimizer) -> None:
        model[0].load_state_dict({name: torch.full_like(t, 0.5) for name, t in model[0].state_dict().items()})

    def script() -> list[float]:
        return train(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6), after_epoch=load)

    for found in run_script(script, 2, plan):
        assert apart(found[:48], [0.5] * 48) < 1e-3


CLAMPS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda parameter: parameter.data.clamp_(-0.01, 0.01),
    "no_grad": lambda parameter: parameter.detach().clamp_(-0.01, 0.01),
}


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize(
    "plan",
    ["topology=server", "consistency=async topology=server", "consistency=async(push=difference) topology=server"],
)
def test_parameters_that_a_script_writes_are_refused_at_servers(plan: str, clamp: str) -> None:
    # Regression: servers sent back weights that were not clamped, and nobody was told.
    def script() -> None:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(16), 8))
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            CLAMPS[clamp](cast(nn.Parameter, model[0].weight))

    with pytest.raises(UsageError, match=r"written by the script \(0.weight\).*topology=native"):
        run_script(script, 2, f"data {plan}")
    run_script(script, 2, "data consistency=elastic(2) topology=server")


@pytest.mark.parametrize("plan", ["topology=server", "consistency=async topology=server"])
def test_weights_that_are_swapped_for_an_evaluation_and_back_are_no_writes(plan: str) -> None:
    def swap(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                own = parameter.clone()
                parameter.zero_()
                parameter.copy_(own)

    swapped = run_script(partial(train, change=swap, after_epoch=swap), 2, f"data {plan}")
    assert swapped == run_script(train, 2, f"data {plan}")


def test_a_run_is_recorded_and_repeated(tmp_path: Path) -> None:
    plan = "data consistency=async topology=server(2)"
    recorded = run_script(train, 3, plan, run=tmp_path)
    assert len(list(tmp_path.rglob("*shard*"))) == 2
    assert run_script(train, 3, plan, replay=tmp_path) == recorded


# ---- real processes


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["async topology=server", "gossip(ring,mix=pair)"])
def test_a_rank_that_fails_ends_at_once_with_what_it_serves(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, make_secret().hex())
    with pytest.raises(AssertionError, match="ValueError: the script's own"):
        run_processes("tests.distributed.woven:fail_beside_servers", 2, rank=1, plan=f"data consistency={plan}")


# ---- what is refused


@pytest.mark.parametrize(
    ("plan", "optimizer", "text"),
    [
        ("data consistency=async topology=server", "LBFGS", "evaluates the loss several times.*sync or local"),
        ("data consistency=gossip(ring)", "LBFGS", "evaluates the loss several times"),
        ("data consistency=async topology=server(2)", "Own", r"look at all parameters.*topology=server\(1\)"),
        ("data consistency=local(2)", "", r"there is none.*give weave one"),
        ("data=2 consistency=async topology=server(1,place=own)", "SGD", r"no ranks.*weft launch --plan"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_that_does_not_fit_the_optimizer_is_refused(plan: str, optimizer: str, text: str, size: int) -> None:
    class Own(torch.optim.SGD):
        pass

    def script() -> None:
        model = make_model()
        kind = Own if optimizer == "Own" else getattr(torch.optim, optimizer, None)
        weave(model, kind and kind(model.parameters(), lr=0.1), None, plan=plan)

    if size == 1 and plan.startswith("data=2"):
        text = "plan: 2, ranks: 1"
    with pytest.raises(PlanError, match=text):
        run_script(script, size)


def test_parameters_that_come_after_weave_are_told() -> None:
    def unfreeze(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        model.requires_grad_(True)

    def add(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def frozen(model: nn.Module) -> torch.optim.Optimizer:
        next(model.parameters()).requires_grad_(False)
        return sgd(model)

    for plan in ("data", "data consistency=local(2)"):
        with pytest.raises(UsageError, match=r"unfrozen after weave.*0\.weight"):
            run_script(partial(train, optimizer=frozen, change=unfreeze), 2, plan)
        with pytest.raises(UsageError, match=r"has got parameters after weave.*woven: 4, now: 5"):
            run_script(partial(train, optimizer=sgd, change=add), 2, plan)


def test_servers_are_those_of_one_weave() -> None:
    def script() -> None:
        for _ in range(2):
            model = make_model()
            weave(model, sgd(model), None)

    with pytest.raises(PlanError, match=r"servers already.*in one call"):
        run_script(script, 2, "data consistency=async topology=server")


def test_a_sparse_gradient_is_refused_at_servers() -> None:
    def script() -> None:
        model = nn.Embedding(4, 2, sparse=True)
        model, optimizer, _ = weave(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"not dense \(weight"):
        run_script(script, 2, "data consistency=async topology=server")
