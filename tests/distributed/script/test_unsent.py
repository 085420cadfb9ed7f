"""What a codec keeps back, and scripts that throw gradients away or scale them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.distributed.script.loops import data_of, make_model
from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.weaving import scaling
from weft.distributed.script.weaving.weave import weave

KEEPING = ["topk(0.1)", "threshold(0.1)", "randomk(0.1)", "onebit", "sign", "powersgd(1)", "dgc(0.1)"]


@contextmanager
def none_warned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- gradients that are thrown away


def adversaries(*, freezes: bool = False, to_none: bool = True, apart: bool = True) -> Callable[[], bool]:
    """Two models of which one trains through the other; whether the other was still while the first was trained.

    Args:
        freezes: the one that is not trained.
        apart: whether they are two models, or parts of one.
    """

    def script() -> bool:
        torch.manual_seed(1)
        net_d, net_g = nn.Linear(4, 3), nn.Linear(2, 4)
        opt_d, opt_g = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (net_d, net_g))
        weave([net_d, net_g] if apart else nn.ModuleList([net_d, net_g]), [opt_d, opt_g], None)
        noise = weft.share(torch.randn(8, 2))
        for _ in range(3):
            opt_d.zero_grad(set_to_none=to_none)
            net_d(net_g(noise).detach()).square().mean().backward()
            opt_d.step()
            net_d.requires_grad_(not freezes)
            opt_g.zero_grad(set_to_none=to_none)
            net_d(net_g(noise)).mean().backward()
            opt_g.step()
            net_d.requires_grad_(True)
        return True

    return script


@pytest.mark.parametrize("compress", KEEPING)
def test_gradients_that_are_thrown_away_are_told_of_once_with_the_cure(compress: str) -> None:
    # Regression: the generator's backward left a rest of the discriminator's gradients with the codec, which came
    # with the next ones, against which it trains.
    match = (
        r"thrown away after their exchange.*\(parameter: 0\.weight, compress=.+\); .*requires_grad_\(False\), or use"
    )
    with pytest.warns(UserWarning, match=match) as told:
        run_script(adversaries(), 2, f"data=2 compress={compress}")
    assert len(told) == 1


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_they_are_found_however_they_are_cleared(apart: bool, to_none: bool) -> None:
    with pytest.warns(UserWarning, match="thrown away after their exchange"):
        run_script(adversaries(apart=apart, to_none=to_none), 2, "data=2 compress=onebit")


def test_a_model_that_is_frozen_meanwhile_loses_nothing() -> None:
    with none_warned():
        run_script(adversaries(freezes=True), 2, "data=2 compress=topk(0.1)")


@pytest.mark.parametrize("compress", ["none", "bf16", "qsgd(8)", "terngrad"])
def test_codecs_that_keep_nothing_back_are_silent(compress: str) -> None:
    with none_warned():
        run_script(adversaries(), 2, f"data=2 compress={compress}")


def skipping(number: int) -> Callable[[], None]:
    """A script that leaves out one step of four."""

    def script() -> None:
        model = make_model()
        weave(model, own := torch.optim.SGD(model.parameters(), lr=0.1), None)
        for step in range(4):
            own.zero_grad()
            model(data_of(8).tensors[0]).square().mean().backward()
            if step != number:
                own.step()

    return script


def test_a_step_that_is_left_out_is_told_of() -> None:
    with pytest.warns(UserWarning, match="thrown away after their exchange"):
        run_script(skipping(1), 2, "data=2 compress=topk(0.1)")
    with none_warned():  # nothing comes after the last
        run_script(skipping(3), 2, "data=2 compress=topk(0.1)")


def test_gradients_that_are_added_up_or_that_a_closure_uses_are_not_thrown_away() -> None:
    def script() -> None:
        model, x = make_model(), data_of(8).tensors[0]
        weave(model, own := torch.optim.LBFGS(model.parameters(), max_iter=3), None)

        def closure() -> Tensor:
            own.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            own.step(closure)
        other = make_model()
        weave(other, plain := torch.optim.SGD(other.parameters(), lr=0.1), None)
        for _ in range(3):
            plain.zero_grad()
            for part in x.split(4):
                other(part).square().mean().backward()
            plain.step()

    with none_warned():
        run_script(script, 2, "data=2 compress=topk(0.02)")


# ---- gradients that are scaled


def scaled(
    scaler_of: Callable[[], Any] = lambda: torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2),
    *,
    by_hand: bool = False,
    several: bool = False,
) -> Callable[[], list[float]]:
    """Nine steps with a scaler whose scale grows after every other one; the weights in the end.

    Args:
        by_hand: the script sets the scale.
        several: another scaler has every third step.
    """

    def script() -> list[float]:
        model = make_model()
        weave(model, own := torch.optim.SGD(model.parameters(), lr=0.1), None)
        x = weft.share(data_of(16).tensors[0])
        scalers = [scaler_of(), scaler_of()]
        for step in range(9):
            scaler = scalers[int(several and step % 3 == 2)]
            own.zero_grad()
            scaler.scale((model(x) - 1).square().mean()).backward()
            scaler.step(own)
            scaler.update(*[2.0 ** (step % 4)] if by_hand else [])
        assert not scaler.is_enabled() or several or scaler.get_scale() == (1.0 if by_hand else 16.0)
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    return script


def without_scaler() -> Any:
    return torch.amp.GradScaler("cpu", enabled=False)


PLANS = [f"data=2 compress={codec}" for codec in ("topk(0.1)", "dgc(0.1,warmup=2)", "onebit", "powersgd(1)")]
PLANS += ["shard=2 compress=topk(0.1)", "shard=2 shard_level=2 compress=topk(0.1)"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_waits_follows_the_scale(plan: str, by_hand: bool) -> None:
    # Regression: what was kept of gradients before a change of scale counted half, or double, after it.
    assert run_script(scaled(by_hand=by_hand), 2, plan) == run_script(scaled(without_scaler), 2, plan)


def test_what_does_not_follow_the_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "rescale_unsent", lambda codec, factor: None)
    assert run_script(scaled(), 2, PLANS[0]) != run_script(scaled(without_scaler), 2, PLANS[0])


def test_servers_are_pushed_gradients_that_are_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "rescale_unsent", None)
    run_script(scaled(), 2, "data=2 topology=server compress=topk(0.1)")


def test_several_scalers_are_told_of_once() -> None:
    with pytest.warns(UserWarning, match=r"several scalers.*\(compress=topk.+\); use one torch.amp.GradScaler") as told:
        run_script(scaled(several=True), 2, PLANS[0])
    assert len(told) == 1
    with none_warned():
        run_script(scaled(several=True), 2, "data=2 compress=bf16")


def test_one_process_with_a_scaler_is_as_ever() -> None:
    run_script(scaled(), 2, PLANS[0])  # which has torch.amp.GradScaler tell of its scale, for good
    torch.testing.assert_close(scaled()(), scaled(without_scaler)(), rtol=0, atol=0)
