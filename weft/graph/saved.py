"""Saved graphs: a step without its Python code, as JSON and safetensors.

    step/
      graph.json              version, arguments, results, nodes
      constants.safetensors   the tensors that the step holds

Reading runs nothing that the file names except operators of a known list: no pickle, no eval, no import.
"""

import hashlib
import json
import operator
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor, fx

from weft.atomic import use_new_folder, write_json
from weft.errors import CorruptFileError, GraphError
from weft.graph.encoding import decode, decode_tree, decode_value, encode, encode_value
from weft.graph.graph import Graph
from weft.graph.validity import check_graph
from weft.torch_private import fake_mode

__all__ = ["VERSION", "load_graph", "save_graph"]

VERSION = 1

_FORMAT = "weft graph"
_KEYS = {"format", "version", "torch", "arguments", "results", "constants_sha256", "nodes"}
_NODE_KEYS = {"name", "kind", "target", "args", "kwargs", "value", "is_backward", "in_grad_mode", "line"}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Beside those that PyTorch calls core. All are pure functions of tensors; none touches a file.
_KNOWN = frozenset(
    """
    _log_softmax_backward_data _native_batch_norm_legit_functional _safe_softmax
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _softmax_backward_data _unsafe_view addcdiv addcmul bernoulli binary_cross_entropy
    binary_cross_entropy_with_logits div elu_backward empty_like gelu_backward hardtanh_backward huber_loss
    huber_loss_backward leaky_relu_backward lift_fresh_copy linalg_vector_norm log_sigmoid_backward
    log_sigmoid_forward logsumexp masked_fill mkldnn_rnn_layer mkldnn_rnn_layer_backward mse_loss mse_loss_backward
    native_batch_norm native_batch_norm_backward native_dropout_backward new_empty new_full new_ones new_zeros
    nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward norm ones ones_like rand rand_like
    randn randn_like rsub select_backward sigmoid_backward silu_backward slice_backward smooth_l1_loss
    smooth_l1_loss_backward softplus softplus_backward split square stack t tanh_backward threshold_backward
    transpose unbind unfold_backward unsafe_split upsample_nearest2d_backward var var_mean zeros zeros_like
    """.split()  # noqa: SIM905 -- a list of seventy quoted names is hard to read
)


def save_graph(graph: Graph, folder: Path, *, also: Collection[str] = ()) -> None:
    """Write a folder that `load_graph` reads, whole or not at all. It must not exist.

    Args:
        also: operators beside those of ATen, such as `("my_library.scale.default",)`.

    Raises:
        GraphError: the folder exists, or the graph calls an operator that a saved graph may not hold.
    """
    if folder.exists():
        raise GraphError(f"folder exists ({folder}); choose another")
    check_graph(graph)
    for node in graph.nodes.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            _find_operator(str(node.target), also)
    constants = write_tensors({name: tensor.detach().contiguous() for name, tensor in graph.constants.items()})
    document = {
        "format": _FORMAT,
        "version": VERSION,
        "torch": str(torch.__version__),
        "arguments": encode(graph.arguments),
        "results": encode(graph.results),
        "constants_sha256": hashlib.sha256(constants).hexdigest(),
        "nodes": [_node_to_json(node) for node in graph.nodes.nodes],
    }
    with use_new_folder(folder) as scratch:
        (scratch / "constants.safetensors").write_bytes(constants)
        write_json(scratch / "graph.json", document)


def load_graph(folder: Path, *, also: Collection[str] = ()) -> Graph:
    """The graph that `save_graph` wrote.

    Args:
        also: operators beside those of ATen that the graph may call; whoever reads must have registered them.

    Raises:
        GraphError: a version or an operator that is not known here.
        CorruptFileError: a file that is missing, truncated, or not what it claims to be.
    """
    try:
        document = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        constants = (folder / "constants.safetensors").read_bytes()
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"saved graph cannot be read ({folder}: {error})") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CorruptFileError(f"not a saved graph ({folder})")
    if document.get("version") != VERSION:
        found = document.get("version")
        raise GraphError(f"saved graph is of another version ({folder}: {found}, known: {VERSION}); save it again")
    _check_keys(document, _KEYS, folder)
    if hashlib.sha256(constants).hexdigest() != document["constants_sha256"]:
        raise CorruptFileError(f"constants are not those of the saved graph ({folder}); copy the folder again")
    try:
        return _from_document(document, read_tensors(constants), also, folder)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, SafetensorError, RecursionError) as error:
        if isinstance(error, GraphError):
            raise
        raise CorruptFileError(f"saved graph is not well formed ({folder}: {error})") from error


def _from_document(
    document: Mapping[str, Any], constants: Mapping[str, Tensor], also: Collection[str], folder: Path
) -> Graph:
    nodes, mode = fx.Graph(), fake_mode()
    known: dict[str, fx.Node] = {}
    for item in document["nodes"]:
        _check_keys(item, _NODE_KEYS, folder)
        name, kind = item["name"], item["kind"]
        if not _IDENTIFIER.fullmatch(name) or name in known:
            raise CorruptFileError(f"not the name of a node, or one for the second time ({folder}: {name!r})")
        if kind not in ("placeholder", "get_attr", "call_function", "output"):
            raise GraphError(f"saved graph has a node of an unknown kind ({folder}: {kind!r})")
        target = _find_target(item["target"], also) if kind == "call_function" else str(item["target"])
        args, kwargs = decode(item["args"], known), decode(item["kwargs"], known)
        node = nodes.create_node(kind, target, args, kwargs, name=name)
        node.meta = {key: item[key] for key in ("is_backward", "in_grad_mode", "line")}
        if kind != "output":
            node.meta["val"] = decode_value(item["value"], mode)
        known[name] = node
    arguments, results = decode_tree(document["arguments"]), decode_tree(document["results"])
    graph = Graph(nodes, arguments, results, constants)
    check_graph(graph)
    return graph


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    is_item = node.target is operator.getitem
    return {
        "name": node.name,
        "kind": node.op,
        "target": "getitem" if is_item else str(node.target),
        "args": encode(node.args),
        "kwargs": encode(dict(node.kwargs)),
        "value": encode_value(node.meta.get("val")),
        "is_backward": bool(node.meta.get("is_backward", False)),
        "in_grad_mode": bool(node.meta.get("in_grad_mode", False)),
        "line": str(node.meta.get("line", "")),
    }


def _find_target(dotted: str, also: Collection[str]) -> Any:
    return operator.getitem if dotted == "getitem" else _find_operator(dotted, also)


def _find_operator(dotted: str, also: Collection[str]) -> Any:
    """The operator of that name, if a saved graph may call it."""
    namespace, _, rest = dotted.partition(".")
    name, _, overload = rest.partition(".")
    if not all(map(_IDENTIFIER.fullmatch, (namespace, name, overload))):
        raise GraphError(f"not the name of an operator ({dotted!r})")
    packet: Any = None
    if namespace == "aten" or dotted in also:
        packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or overload not in packet.overloads():
        raise GraphError(f"operator is not known here ({dotted}); name it in also= if you trust the graph")
    assert packet is not None
    is_core = any(torch.Tag.core in getattr(packet, each).tags for each in packet.overloads())
    if dotted not in also and name not in _KNOWN and not is_core:
        raise GraphError(f"operator is not one that a saved graph may call ({dotted}); name it in also=")
    return getattr(packet, overload)


def _check_keys(item: Any, wanted: set[str], folder: Path) -> None:
    if not isinstance(item, dict) or set(item) != wanted:
        found = sorted(set(item) ^ wanted) if isinstance(item, dict) else item
        raise CorruptFileError(f"saved graph lacks or has unknown keys ({folder}: {found})")
