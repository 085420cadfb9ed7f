"""An operator in Python: eager, captured, compiled, with several outputs and attributes, and refused when wrong."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from weft.errors import UsageError
from weft.metrics.flops import count_flops
from weft.operators import Cost, cost_of, operator
from weft.operators.operator import Operator


class ScaledProduct:
    """scale * a * b, and a + b."""

    def forward(self, a: Tensor, b: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return scale * a * b, a + b

    def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
        (product, total), (a, b, scale) = grads, inputs
        return scale * product * b + total, scale * product * a + total, None

    def cost(self, a: Tensor, b: Tensor, scale: float = 2.0) -> Cost:
        return Cost(flops=3 * a.numel(), bytes_read=8 * a.numel(), bytes_written=8 * a.numel())


class NumpySine:
    """Nothing that torch can look into, so that shapes and gradient must be given."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    def infer(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
        return grads[0] * torch.from_numpy(np.cos(inputs[0].numpy()))


@pytest.fixture(scope="module")
def product() -> Operator:
    return operator(ScaledProduct, name="tests::scaled_product")


@pytest.fixture(scope="module")
def sine() -> Operator:
    return operator(NumpySine(), name="tests::numpy_sine", opaque_backward=True)


def expected_gradients(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, ...]:
    return torch.autograd.grad((scale * a * b).sin().sum() + (a + b).square().sum(), [a, b])


def gradients(product: Operator, a: Tensor, b: Tensor, *scale: float) -> tuple[Tensor, ...]:
    first, second = product(a, b, *scale)
    return torch.autograd.grad(first.sin().sum() + second.square().sum(), [a, b])


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)


# An argument that equals its default is left out by the dispatcher.
@pytest.mark.parametrize("scale", [(), (2.0,), (3.5,)])
def test_operator_values_and_gradients_in_eager_mode(product: Operator, scale: tuple[float, ...]) -> None:
    a, b = pair()
    for found, wanted in zip(gradients(product, a, b, *scale), expected_gradients(a, b, *scale or (2.0,)), strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(product(a, b=b, scale=3.0)[0], 3 * a * b)


def test_an_output_that_nobody_uses_has_a_gradient_of_zero(product: Operator) -> None:
    a, b = pair()
    (found,) = torch.autograd.grad(product(a, b)[1].sum(), [a])
    assert torch.equal(found, torch.ones_like(a))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_captured_graph_holds_an_operator_as_one_node(product: Operator, mode: Any) -> None:
    def step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return gradients(product, a.detach().requires_grad_(), b.detach().requires_grad_(), 3.0)

    a, b = pair()
    graph = make_fx(step, tracing_mode=mode)(a.detach(), b.detach())
    assert [node.target for node in graph.graph.nodes].count(product.overload) == 1
    for found, wanted in zip(graph(a.detach(), b.detach()), expected_gradients(a, b, 3.0), strict=True):
        torch.testing.assert_close(found, wanted)


def test_captured_graph_holds_an_opaque_backward_as_one_node(sine: Operator) -> None:
    def step(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(sine(x).sum(), [x])[0]

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(3))
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("tests.numpy_sine_backward.default") == 1
    torch.testing.assert_close(graph(torch.arange(3.0)), torch.arange(3.0).cos())


def test_operator_under_torch_compile(product: Operator, sine: Operator) -> None:
    def function(a: Tensor, b: Tensor) -> Any:
        return sine(product(a, b, 3.0)[0]).sum()

    a, b = pair()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(a, b), [a, b])
    wanted = torch.autograd.grad((3 * a * b).sin().sum(), [a, b])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    torch.compiler.reset()


def test_gradient_of_a_gradient(product: Operator) -> None:
    a, b = (value.detach().double().requires_grad_() for value in pair())
    assert torch.autograd.gradgradcheck(lambda a, b: product(a, b, 3.0), (a, b))


def test_in_a_module_two_calls_share_nothing(product: Operator) -> None:
    a, b = pair()
    first, second = product(a, b)[0], product(b, a)[0]
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_cost_reaches_planner_and_flop_counter(product: Operator) -> None:
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    assert product.cost(a, b) == cost_of(product.overload, (a, b), {}, None) == Cost(36, 96, 96)
    assert count_flops(lambda: product(a, b)) == 36


def test_an_opaque_backward_may_give_what_it_was_given() -> None:
    class Sum:
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
            return grads[0], grads[0]

    total = operator(Sum, name="tests::opaque_sum", opaque_backward=True)
    a, b = pair()
    grad_a, grad_b = torch.autograd.grad(total(a, b).sum(), [a, b])
    assert torch.equal(grad_a, grad_b) and grad_a.data_ptr() != grad_b.data_ptr()


class Plain:
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Misspelt(Plain):
    def backwards(self, grads: Any, inputs: Any, outputs: Any) -> Any: ...


class NotAnnotated:
    def forward(self, x):  # type: ignore[no-untyped-def]
        return 2 * x


class Variadic:
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0]


class NoResult:
    def forward(self, x: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("subject", "name", "cure"),
    [
        (object(), None, "forward"),
        (Misspelt, None, "did you mean 'backward'"),
        (NotAnnotated, None, "annotate"),
        (Variadic, None, "write out each by name"),
        (NoResult, None, "annotate the result"),
        (Plain, "no namespace", "namespace::name"),
    ],
)
def test_what_is_no_operator_is_refused(subject: object, name: str | None, cure: str) -> None:
    with pytest.raises(UsageError, match=cure):
        operator(subject, name=name)


def test_two_authors_may_not_take_one_name_but_one_may_write_again() -> None:
    assert operator(Plain, name="tests::taken")(torch.ones(1)) == 2
    assert operator(Plain, name="tests::taken")(torch.ones(1)) == 2
    with pytest.raises(UsageError, match="two operators of one name"):
        operator(ScaledProduct, name="tests::taken")


def test_a_name_is_made_from_the_class() -> None:
    class HardSwish(Plain):
        pass

    assert operator(HardSwish).name == "custom::hard_swish"


def test_forward_that_needs_data_asks_for_infer() -> None:
    class NoShape:
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(np.sin(x.numpy()))

    blind = operator(NoShape, name="tests::no_shape")
    with pytest.raises(UsageError, match="write infer"):
        make_fx(lambda x: blind(x), tracing_mode="fake")(torch.ones(2))


# Autograd would sum a gradient that is too large down to the input's shape, and hide the fault.
@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (lambda grad: grad.expand(5, 3), "shape"),
        (lambda grad: (grad, None), "2 gradients for 1 inputs"),
    ],
)
def test_gradients_of_a_wrong_form_are_refused(result: Any, fault: str) -> None:
    class Wrong(Plain):
        def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
            return result(grads[0])

    name = f"tests::wrong_{fault.split()[0].replace('2', 'two')}"
    with pytest.raises(UsageError, match=fault):
        operator(Wrong, name=name)(torch.ones(3, requires_grad=True)).sum().backward()


def test_samples_are_the_same_for_the_same_seed_and_leave_the_generator_alone() -> None:
    class Sampled(Plain):
        def samples(self) -> list[Tensor]:
            return [torch.randn(2), torch.randn(3)]

    sampled = operator(Sampled, name="tests::sampled")
    state = torch.get_rng_state()
    first, again, other = (list(sampled.samples(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[1][0], again[1][0]) and not torch.equal(first[1][0], other[1][0])
    with pytest.raises(UsageError, match="samples"):
        list(operator(Plain, name="tests::unsampled").samples())
