"""ONNX models as modules: trained further, captured, and refused with a reason."""

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from weft.errors import CorruptFileError, GraphError
from weft.graph import EagerExecutor, GraphExecutor
from weft.graph.onnx import IMPORTS, OnnxModule, from_onnx, load, to_onnx
from weft.specs import Batch


@pytest.fixture
def network() -> tuple[nn.Module, OnnxModule]:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    return module, from_onnx(to_onnx(module, [torch.ones(2, 1, 6, 6)]))


def test_weights_are_parameters_under_their_names(network: tuple[nn.Module, OnnxModule]) -> None:
    module, imported = network
    found = dict(imported.named_parameters())
    assert found.keys() == {"0_weight", "0_bias", "4_weight", "4_bias"}
    assert torch.equal(found["4_weight"], module.get_parameter("4.weight"))


def test_an_imported_model_has_the_gradients_of_its_source(network: tuple[nn.Module, OnnxModule]) -> None:
    module, imported = network
    x = torch.randn(2, 1, 6, 6)
    for one in network:
        one(x).square().sum().backward()
    for name, parameter in imported.named_parameters():
        expected = module.get_parameter(name.replace("_", ".")).grad
        torch.testing.assert_close(parameter.grad, expected)


def test_an_imported_model_can_be_captured_and_trained(network: tuple[nn.Module, OnnxModule]) -> None:
    _, imported = network
    batch = Batch((torch.randn(2, 1, 6, 6),), (torch.randn(2, 3),))
    found = []
    for executor in (EagerExecutor(imported, nn.functional.mse_loss), GraphExecutor(imported, nn.functional.mse_loss)):
        gradients: dict[str, object] = {}
        outputs, _ = executor(executor.initial_state(), batch, gradients.__setitem__)
        found.append((outputs.loss, gradients))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].keys() == found[1][1].keys()


def test_the_number_of_inputs_is_checked(network: tuple[nn.Module, OnnxModule]) -> None:
    with pytest.raises(GraphError, match=r"given: 2, wanted: inputs.0"):
        network[1](torch.ones(2, 1, 6, 6), torch.ones(1))


def model_of(kind: str, opset: int = 20, domain: str = "", **attributes: Any) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    other = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    node = helper.make_node(kind, ["x"], ["y"], domain=domain, name="here", **attributes)
    graph = helper.make_graph([node], "g", [value], [other])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def test_what_is_not_in_the_table_is_named() -> None:
    with pytest.raises(GraphError, match=r"operator: Hardmax, node: here\); did you mean"):
        from_onnx(model_of("Hardmax"))
    with pytest.raises(GraphError, match=r"operator: com.example.Relu"):
        from_onnx(model_of("Relu", domain="com.example"))
    with pytest.raises(GraphError, match=r"operator set: 6, oldest: 7"):
        from_onnx(model_of("Relu", opset=6))


def test_a_type_that_torch_has_not_is_named() -> None:
    with pytest.raises(GraphError, match="type: FLOAT8E4M3FN"):
        from_onnx(model_of("Cast", to=TensorProto.FLOAT8E4M3FN))(torch.ones(2))


def test_an_output_that_is_not_made_is_named() -> None:
    model = model_of("MaxPool", kernel_shape=[2])
    model.graph.node[0].output.append("places")
    with pytest.raises(GraphError, match=r"not made here \(MaxPool: places\)"):
        from_onnx(model)(torch.ones(1, 1, 4))


def test_tensors_outside_the_file_are_not_read() -> None:
    model = model_of("Relu")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../secret")
    model.graph.initializer.append(tensor)
    with pytest.raises(GraphError, match=r"stored outside the file \(name: w\)"):
        from_onnx(model)


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(range(256))])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(CorruptFileError, match="not an ONNX model"):
        load(tmp_path / "model.onnx")
    with pytest.raises(CorruptFileError):
        load(tmp_path / "absent.onnx")


def test_names_that_clash_are_kept_apart() -> None:
    model = model_of("Relu")
    for name in ("a.b", "a/b", "forward"):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [1], [1.0]))
    assert len(dict(from_onnx(model).named_parameters())) == 3


def test_the_documentation_lists_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "onnx.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(\w+)`", text[text.index("- element-wise:") :])
    assert sorted(listed) == sorted(IMPORTS)
