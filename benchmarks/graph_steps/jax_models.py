"""The same models in JAX, as one would write them there: pure functions, jitted whole, state donated.

Shapes and operations are those of the PyTorch models, weights are not: only times are compared.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.graph_steps.cases import LENGTH, LR, MOMENTUM, VOCABULARY, WIDTHS, Case

__all__ = ["steps"]

NUM_LAYERS, NUM_HEADS = 4, 4  # of the GPT
STAGES = ((16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1))  # channels, stride

Parameters = dict[str, Any]
Apply = Callable[[Parameters, Any], Any]


def steps(case: Case) -> Iterator[float]:
    """Endless: the loss of one step after the other."""
    make, apply = MODELS[case.model]
    parameters = make(np.random.default_rng(0))
    velocity = jax.tree.map(jnp.zeros_like, parameters)
    step = jax.jit(partial(_step, apply), donate_argnums=(0, 1))
    batches = case.batches()
    for x, y in batches:
        parameters, velocity, loss = step(parameters, velocity, _layout(case, x.numpy()), y.numpy())
        yield float(loss)


def _step(apply: Apply, parameters: Parameters, velocity: Parameters, x: Any, y: Any) -> tuple[Any, Any, Any]:
    def loss_of(parameters: Parameters) -> Any:
        logits = jax.nn.log_softmax(apply(parameters, x))
        return -jnp.take_along_axis(logits, y[..., None], axis=-1).mean()

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - LR * v, parameters, velocity), velocity, loss


def _layout(case: Case, x: Any) -> Any:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if case.model == "resnet20" else x


def _random(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(0.05 * rng.standard_normal(shape), jnp.float32)


def _linear(rng: np.random.Generator, before: int, after: int) -> Parameters:
    return {"w": _random(rng, before, after), "b": jnp.zeros(after)}


def _through(layer: Parameters, x: Any) -> Any:
    return x @ layer["w"] + layer["b"]


def _make_mlp(rng: np.random.Generator) -> Parameters:
    sizes = (784, WIDTHS["mlp"], WIDTHS["mlp"], 10)
    return {str(i): _linear(rng, sizes[i], sizes[i + 1]) for i in range(3)}


def _mlp(p: Parameters, x: Any) -> Any:
    return _through(p["2"], jax.nn.relu(_through(p["1"], jax.nn.relu(_through(p["0"], x)))))


def _make_resnet(rng: np.random.Generator) -> Parameters:
    p: Parameters = {"first": _norm_conv(rng, 3, 16), "last": _linear(rng, 64, 10)}
    before = 16
    for i, (after, _) in enumerate(STAGES):
        p[f"a{i}"], p[f"b{i}"] = _norm_conv(rng, before, after), _norm_conv(rng, after, after)
        before = after
    return p


def _norm_conv(rng: np.random.Generator, before: int, after: int) -> Parameters:
    return {"w": _random(rng, 3, 3, before, after), "scale": jnp.ones(after), "shift": jnp.zeros(after)}


def _conv_norm(layer: Parameters, x: Any, stride: int = 1) -> Any:
    """Convolution and batch norm. Running statistics are left out: they are not in the way of a gradient."""
    padding = ((1, 1), (1, 1))
    y = jax.lax.conv_general_dilated(
        x, layer["w"], (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
    return (y - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]


def _resnet(p: Parameters, x: Any) -> Any:
    x = jax.nn.relu(_conv_norm(p["first"], x))
    for i, (after, stride) in enumerate(STAGES):
        y = jax.nn.relu(_conv_norm(p[f"a{i}"], x, stride))
        short = x[:, ::stride, ::stride]
        short = jnp.pad(short, ((0, 0), (0, 0), (0, 0), (0, after - short.shape[-1])))
        x = jax.nn.relu(short + _conv_norm(p[f"b{i}"], y))
    return _through(p["last"], x.mean((1, 2)))


def _make_lstm(rng: np.random.Generator) -> Parameters:
    width, embedding = WIDTHS["lstm"], 32
    gates = {"x": _linear(rng, embedding, 4 * width), "h": _linear(rng, width, 4 * width)}
    return {"embedding": _random(rng, VOCABULARY, embedding), **gates, "head": _linear(rng, width, VOCABULARY)}


def _lstm(p: Parameters, tokens: Any) -> Any:
    inputs = _through(p["x"], p["embedding"][tokens]).swapaxes(0, 1)

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x + _through(p["h"], h), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((tokens.shape[0], WIDTHS["lstm"]))
    _, hidden = jax.lax.scan(cell, (zeros, zeros), inputs)
    return _through(p["head"], hidden.swapaxes(0, 1))


def _make_gpt(rng: np.random.Generator) -> Parameters:
    width = WIDTHS["gpt"]
    p: Parameters = {"tokens": _random(rng, VOCABULARY, width), "places": _random(rng, LENGTH, width)}
    for i in range(NUM_LAYERS):
        p[f"qkv{i}"], p[f"out{i}"] = _linear(rng, width, 3 * width), _linear(rng, width, width)
        p[f"up{i}"], p[f"down{i}"] = _linear(rng, width, 4 * width), _linear(rng, 4 * width, width)
    for name in ("last", *(f"{part}{i}" for i in range(NUM_LAYERS) for part in ("norm_a", "norm_b"))):
        p[name] = {"scale": jnp.ones(width), "shift": jnp.zeros(width)}
    return p


def _gpt(p: Parameters, tokens: Any) -> Any:
    x = p["tokens"][tokens] + p["places"][: tokens.shape[1]]
    for i in range(NUM_LAYERS):
        x = x + _attend(p, i, _normalised(p[f"norm_a{i}"], x))
        up = jax.nn.gelu(_through(p[f"up{i}"], _normalised(p[f"norm_b{i}"], x)), approximate=False)
        x = x + _through(p[f"down{i}"], up)
    return _normalised(p["last"], x) @ p["tokens"].T


def _attend(p: Parameters, i: int, x: Any) -> Any:
    batch, length, width = x.shape
    q, k, v = (
        t.reshape(batch, length, NUM_HEADS, width // NUM_HEADS)
        for t in jnp.split(_through(p[f"qkv{i}"], x), 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return _through(p[f"out{i}"], mixed.reshape(batch, length, width))


def _normalised(layer: Parameters, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]


MODELS: dict[str, tuple[Callable[[np.random.Generator], Parameters], Apply]] = {
    "mlp": (_make_mlp, _mlp),
    "resnet20": (_make_resnet, _resnet),
    "lstm": (_make_lstm, _lstm),
    "gpt": (_make_gpt, _gpt),
}
