"""What only the reference executor promises: float64, on a copy."""

import pytest
import torch

from tests.graph.cases import CASES
from tests.graph.contract import take
from weft.graph import EagerExecutor, ReferenceExecutor, State

MLP, CONVOLUTION = CASES[:2]


def test_everything_is_float64_except_counts() -> None:
    executor = ReferenceExecutor(CONVOLUTION.build(), CONVOLUTION.loss)
    outputs, gradients, state = take(executor, executor.initial_state(), CONVOLUTION.batch())
    tensors = [outputs.loss, outputs.predictions, *gradients.values(), *state.parameters.values()]
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {torch.float64}
    assert state.buffers["1.num_batches_tracked"].dtype == torch.int64


def test_the_module_it_was_given_is_left_alone() -> None:
    module = CONVOLUTION.build()
    eager = EagerExecutor(module, CONVOLUTION.loss)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    reference = ReferenceExecutor(module, CONVOLUTION.loss)
    take(reference, reference.initial_state(), CONVOLUTION.batch())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert take(eager, eager.initial_state(), CONVOLUTION.batch())[1].keys() == CONVOLUTION.trainable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_state_is_stepped_exactly(dtype: torch.dtype) -> None:
    reference = ReferenceExecutor(MLP.build(), MLP.loss)
    narrow = {name: p.detach().to(dtype) for name, p in reference.initial_state().parameters.items()}
    _, _, state = take(reference, State(narrow, {}, torch.get_rng_state()), MLP.batch())
    assert all(torch.equal(state.parameters[name], p.double()) for name, p in narrow.items())
    assert all(p.dtype == dtype for p in narrow.values())
