"""Floating-point operations: exact against pencil and paper, and no silent zero for what has no formula."""

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from weft.metrics import flops
from weft.metrics.flops import UncountedFlopsWarning, count_flops, measured_peak, share_of_peak

sizes = st.integers(1, 9)


@given(sizes, sizes, sizes)
def test_a_matrix_product_takes_two_m_n_k(m: int, n: int, k: int) -> None:
    assert count_flops(lambda: torch.ones(m, k) @ torch.ones(k, n)) == 2 * m * n * k


def test_training_a_linear_layer_takes_two_products_and_three_where_its_input_needs_a_gradient() -> None:
    layer, batch, once = nn.Linear(7, 5), torch.ones(3, 7), 2 * 3 * 7 * 5
    assert count_flops(lambda: layer(batch)) == once
    assert count_flops(lambda: layer(batch).sum().backward()) == 2 * once
    assert count_flops(lambda: layer(batch.clone().requires_grad_()).sum().backward()) == 3 * once


def test_a_stack_of_layers_leaves_out_the_gradient_of_the_data_only() -> None:
    model, batch, once = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(4, 8), 2 * 4 * 8 * 8
    assert count_flops(lambda: model(batch).sum().backward()) == (3 + 2) * once


def test_a_convolution_takes_its_kernel_at_every_place() -> None:
    layer = nn.Conv2d(3, 8, kernel_size=3, padding=1)
    assert count_flops(lambda: layer(torch.ones(2, 3, 10, 10))) == 2 * 2 * 8 * 100 * (3 * 3 * 3)


def test_matrix_times_vector_and_vector_times_vector() -> None:
    # torch 2.13 counts these as nothing.
    matrix, vector = torch.ones(3, 4), torch.ones(4)
    assert count_flops(lambda: matrix @ vector) == 24
    assert count_flops(lambda: torch.addmv(torch.ones(3), matrix, vector)) == 24
    assert count_flops(lambda: vector @ vector) == 8


@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_recurrent_network_takes_both_weights_at_every_step(layers: int, directions: int) -> None:
    # On the CPU an LSTM is one operator of its own, which torch 2.13 counts as nothing.
    model = nn.LSTM(8, 16, num_layers=layers, bidirectional=directions == 2)
    weights = sum(p.numel() for name, p in model.named_parameters() if "weight" in name)
    batch = torch.ones(5, 2, 8)  # time, batch, features
    assert count_flops(lambda: model(batch)) == 2 * 5 * 2 * weights
    assert count_flops(lambda: model(batch)[0].sum().backward()) == 3 * 2 * 5 * 2 * weights


def test_attention_takes_two_products_and_five_more_for_its_gradient() -> None:
    # Here, too, the operator of the CPU has no formula in torch 2.13. Backward computes the scores again.
    q = torch.ones(2, 4, 6, 8, requires_grad=True)  # batch, heads, time, features
    once = 2 * 2 * 4 * 6 * 6 * 8
    assert count_flops(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * once
    assert count_flops(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()) == 7 * once


def encode_without_gradient() -> None:
    with torch.no_grad():
        nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()(torch.ones(2, 4, 16))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda: torch.fft.fft(torch.ones(8)), "_fft_r2c"),
        (lambda: torch.linalg.inv(torch.eye(8)), "linalg_inv"),
        (lambda: torch.cdist(torch.ones(3, 2), torch.ones(3, 2)), "cdist"),
        (lambda: torch.ones(3, 3).addmm_(torch.eye(3), torch.eye(3)), "addmm_"),
        (lambda: F.bilinear(torch.ones(2, 3), torch.ones(2, 3), torch.ones(4, 3, 3)), "trilinear"),
        (encode_without_gradient, "_transformer_encoder_layer_fwd"),
    ],
)
def test_work_without_a_formula_is_not_silent(function: Callable[[], object], operator: str) -> None:
    with pytest.warns(UncountedFlopsWarning, match=f"{operator}.*register_flop_formula"):
        count_flops(function)


def test_an_operator_of_someone_else_is_not_silent() -> None:
    with torch.library._scoped_library("weft_test_flops", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        with pytest.warns(UncountedFlopsWarning, match=r"weft_test_flops.double"):
            count_flops(lambda: torch.ops.weft_test_flops.double(torch.ones(2)))


def train_a_bit_of_everything() -> None:
    layers = [
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(18, 4),
    ]
    model = nn.Sequential(*layers, nn.LayerNorm(4))
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.rand(2, 1, 8, 8)), torch.tensor([1, 2])).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_the_usual_parts_of_a_step_raise_no_alarm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_flops(train_a_bit_of_everything) > 0


def test_an_error_in_the_call_goes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    assert count_flops(lambda: torch.ones(2, 2) @ torch.ones(2, 2)) == 16  # and nothing is left behind


def test_the_peak_is_measured_once_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def seconds(matrix: torch.Tensor) -> float:
        measured.append(torch.get_num_threads())
        return 0.5 / torch.get_num_threads()

    flops._measure_peak.cache_clear()
    monkeypatch.setattr(flops, "_seconds", seconds)
    one = measured_peak()
    torch.set_num_threads(2)
    two = measured_peak()
    num_measured = len(measured)
    assert (measured_peak(), len(measured)) == (two, num_measured)
    assert one == 2 * 1024**3 / 0.5 and two == 2 * one
    assert share_of_peak(one / 4) == 0.125
    flops._measure_peak.cache_clear()


def test_measuring_the_peak_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert measured_peak() > 1e6
    assert torch.equal(torch.get_rng_state(), before)
