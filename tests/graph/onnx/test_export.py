"""Forward graphs as ONNX files: what ONNX Runtime makes of them, what comes back, what is refused."""

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from tests.graph.executors.test_built_in_models import SUBJECTS, draw
from weft.errors import GraphError, StorageError
from weft.graph import capture
from weft.graph.onnx import export, from_onnx, graph_to_onnx, load, to_onnx


def run(model: onnx.ModelProto, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {entry.name: tensor.numpy() for entry, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, given)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_models_go_through_a_file_and_back(name: str, tmp_path: Path) -> None:
    task, build = SUBJECTS[name]
    module, inputs = build().eval(), draw(task, 0, num_samples=3).inputs
    expected = module(*inputs).detach()
    export(module, inputs, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    torch.testing.assert_close(run(model, *inputs)[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(load(tmp_path / "model.onnx")(*inputs).detach(), expected, rtol=1e-5, atol=1e-5)


def test_the_file_has_the_names_of_the_module(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = to_onnx(module, [torch.ones(2, 4)])
    assert module.training
    stored = {tensor.name for tensor in model.graph.initializer}
    assert {"0.weight", "0.bias", "1.weight", "1.running_mean"} <= stored
    assert [value.name for value in model.graph.input] == ["inputs.0"]
    assert [value.name for value in model.graph.output] == ["output"]


def test_several_inputs_and_outputs_and_a_tied_weight() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x) + y, self.second(y).softmax(-1)

    module, inputs = Pair(), (torch.randn(2, 3), torch.randn(2, 3))
    model = to_onnx(module, inputs)
    assert sum("weight" in tensor.name for tensor in model.graph.initializer) == 1
    for found, expected in zip(run(model, *inputs), module(*inputs), strict=True):
        torch.testing.assert_close(found, expected.detach())


EXPRESSIONS: dict[str, Any] = {
    "scalars": lambda x: (2 - x) * 3 / 4 + x.pow(2) - 0.5 * x,
    "comparisons": lambda x: torch.where((x > 0) & (x <= 0.5) | (x != x), x, -x),
    "integers": lambda x: (x * 3).long() + torch.arange(4) + (x > 0).sum(),
    "reductions": lambda x: x.amax(1, keepdim=True) + x.amin(0) + x.mean() + x.sum((0, 1)),
    "shapes": lambda x: torch.cat([x.t().unsqueeze(0), x.t()[None, 1:3]], 1).flatten(1)[:, ::2],
    "picking": lambda x: torch.stack([x[0], x[1, :], x.select(0, 2)], 1).index_select(1, torch.tensor([2, 0])),
    "padding": lambda x: nn.functional.pad(x, (1, 2, 0, 1), value=0.5).clamp(-0.3, 0.4),
    "functions": lambda x: x.sigmoid().log() + x.abs().sqrt().erf() + x.square().add(1).rsqrt() + nn.functional.silu(x),
    "more functions": lambda x: nn.functional.elu(x) + nn.functional.leaky_relu(x, 0.2) + x.sin() * x.cos() + x.sign(),
    "constants": lambda x: x + torch.ones(4) * torch.full((3, 1), 2.0) + torch.zeros_like(x),
    "norms": lambda x: (
        nn.functional.layer_norm(x, (4,)) + x.log_softmax(0) + x.maximum(x.flip(0)) if False else x.exp()
    ),
    "splits": lambda x: (
        sum(part.sum(1) for part in x.split([1, 3], 1)) + x.expand(2, 3, 4).permute(2, 0, 1).sum((0, 1))
    ),
    "pools": lambda x: (
        nn.functional.avg_pool2d(x[None, None], 2, 1, padding=1)
        + nn.functional.max_pool2d(x[None, None], 2, 1, padding=1)
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_exported_expression_has_the_values_of_torch(name: str) -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return EXPRESSIONS[name](batch["x"]), state

    x = torch.randn(3, 4)
    model = graph_to_onnx(capture(step, (), {"x": x}))
    (found,) = run(model, x)
    expected = step((), {"x": x})[0]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(from_onnx(model)(x), expected, rtol=1e-5, atol=1e-5)


def test_a_transposed_convolution_comes_out_alike() -> None:
    module, x = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), torch.randn(2, 4, 5, 5)
    (found,) = run(to_onnx(module, [x]), x)
    torch.testing.assert_close(found, module(x).detach(), rtol=1e-5, atol=1e-5)


def test_an_operator_without_a_form_is_named_with_its_line() -> None:
    graph = capture(lambda state, batch: (torch.linalg.inv(batch), state), (), torch.eye(2))
    with pytest.raises(GraphError, match=r"aten.linalg_inv_ex.default, part: forward, line: test_export.py:\d+"):
        graph_to_onnx(graph)


def test_a_backward_pass_is_refused() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        x = batch.detach().requires_grad_()
        return torch.autograd.grad(x.tanh().sum(), x)[0], state

    with pytest.raises(GraphError, match=r"tanh_backward.default, part: backward.*only forward passes"):
        graph_to_onnx(capture(step, torch.ones(1), torch.ones(2)))


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        export(nn.Linear(2, 2), [torch.ones(1, 2)], tmp_path / "file" / "model.onnx")
    with pytest.raises(GraphError):
        export(nn.MultiLabelMarginLoss(), [torch.ones(1, 2), torch.zeros(1, 2).long()], tmp_path / "other.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
