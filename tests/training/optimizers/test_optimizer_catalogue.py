import pytest

from weft.errors import RecipeError, UsageError
from weft.training.component import Component, build
from weft.training.optimizers import OPTIMIZERS, AdamW, Optimizer, TorchOptimizer


def test_options_reach_the_rule() -> None:
    optimizer = build(Component("adamw", lr=3e-4, beta2=0.95, weight_decay=0.1), OPTIMIZERS, "optimizer")
    assert isinstance(optimizer, Optimizer)
    assert (optimizer.rule, optimizer.lr) == (AdamW(beta2=0.95, weight_decay=0.1), 3e-4)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"torch"}))
def test_defaults_are_those_of_torch_optim(name: str) -> None:
    names = {"adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop"}
    optimizer = build(Component(name), OPTIMIZERS, "optimizer")
    reference = build(Component("torch", name=names.get(name, "SGD")), OPTIMIZERS, "optimizer")
    # torch.optim's default for SGD, 0.001, suits no problem; ours is the usual 0.1. It has no layer-wise ones.
    own = {"lars": 1.0, "lamb": 1e-3}.get(name, 0.1)
    assert optimizer.lr == (reference.lr if name in names else own)


def test_torch_optim_by_name_with_options_as_in_a_call() -> None:
    component = Component("torch", name="Adadelta", options="rho=0.8, eps=1e-5")
    optimizer = build(component, OPTIMIZERS, "optimizer")
    assert isinstance(optimizer, TorchOptimizer)
    assert (optimizer.lr, optimizer._options) == (1.0, {"rho": 0.8, "eps": 1e-5})
    assert build(component.with_option("lr", 0.5), OPTIMIZERS, "optimizer").lr == 0.5


@pytest.mark.parametrize(
    ("component", "fact"),
    [
        (Component("adamm"), "did you mean 'adam"),
        (Component("adam", beta=0.9), "did you mean 'beta"),
        (Component("adam", lr="fast"), "wrong type"),
        (Component("adam", lr=-1.0), "out of range .*lr"),
        (Component("torch"), "lacks an option .*name"),
        (Component("torch", name="NAdm"), "did you mean 'NAdam'"),
        (Component("torch", name="Optimizer"), "no such optimizer"),
        (Component("torch", name="lr_scheduler"), "no such optimizer"),
        (Component("torch", name="Adam", options="beta=1"), "unknown option of torch.optim.Adam .*betas"),
        (Component("torch", name="Adam", options="lr=1"), "unknown option"),
        (Component("torch", name="Adam", options="0.9"), "cannot be read"),
        (Component("torch", name="Adam", options="eps=open('x')"), "cannot be read"),
        (Component("torch", name="Adam", options="eps=1) + (2"), "cannot be read"),
        (Component("torch", name="Adam", options="eps=1).get("), "cannot be read"),
        (Component("torch", name="Adam", options="**{}"), r"unknown option .*\*\*"),
    ],
)
def test_wrong_use_is_refused(component: Component, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        build(component, OPTIMIZERS, "optimizer")


def test_unknown_optimizer_is_a_mistake_in_the_recipe() -> None:
    with pytest.raises(RecipeError):
        build(Component("sdg"), OPTIMIZERS, "optimizer")
