"""Saved graphs: a step without its Python code, as JSON and safetensors.

    step/
      graph.json              version, arguments, results, nodes, and the bodies of loops
      constants.safetensors   the tensors that the step holds

Reading runs nothing that the file names except operators of a known list: no pickle, no eval, no import.
"""

import hashlib
import json
import operator
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor

from weft.atomic import use_new_folder, write_json
from weft.errors import CorruptFileError, GraphError
from weft.graph.formats.json_document import GRAPH_KEYS, check_keys, graph_from_json, graph_to_json
from weft.graph.formats.loop_bodies import OPERATORS, bodies_in, find_body, hash_of_body, register_body
from weft.graph.fusion import unfuse
from weft.graph.ir.graph import Graph
from weft.graph.ir.verification import check_graph

__all__ = ["VERSION", "load_graph", "save_graph"]

VERSION = 2
"""1: without named sizes and loops. It is read as a graph that has none."""

_FORMAT = "weft graph"
_NEW_IN_2: Mapping[str, Any] = {"sizes": {}, "conditions": [], "bodies": {}}
_KEYS = {"format", "version", "torch", "constants_sha256", "bodies", *GRAPH_KEYS}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_COLLECTIVES = ("weft.all_reduce.default", "weft.wait.default")

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
    """Write a folder that `load_graph` reads, whole or not at all. Regions are saved unfused.

    Args:
        folder: must not exist.
        also: operators beside those of ATen, such as `("my_library.scale.default",)`.

    Raises:
        GraphError: the folder exists, or the graph calls an operator that a saved graph may not hold.
    """
    if folder.exists():
        raise GraphError(f"folder exists ({folder}); choose another")
    graph = unfuse(graph)
    check_graph(graph)
    parts = {"": graph, **{key: find_body(key) for key in bodies_in(graph)}}
    tensors: dict[str, Tensor] = {}
    for key, part in parts.items():
        for node in part.nodes.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                _find_operator(str(node.target), also)
        tensors |= {_name_in(key, name): tensor.detach().contiguous() for name, tensor in part.constants.items()}
    constants = write_tensors(tensors)
    document = {
        "format": _FORMAT,
        "version": VERSION,
        "torch": str(torch.__version__),
        "constants_sha256": hashlib.sha256(constants).hexdigest(),
        "bodies": {key: graph_to_json(part) for key, part in parts.items() if key},
        **graph_to_json(graph),
    }
    with use_new_folder(folder) as scratch:
        (scratch / "constants.safetensors").write_bytes(constants)
        write_json(scratch / "graph.json", document)


def load_graph(folder: Path, *, also: Collection[str] = ()) -> Graph:
    """Read the graph that `save_graph` wrote. Nothing that the files name is run or imported.

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
    if document.get("version") not in (1, VERSION):
        found = document.get("version")
        raise GraphError(f"saved graph is of another version ({folder}: {found}, known: 1 to {VERSION}); save it again")
    if document["version"] == 1 and not _NEW_IN_2.keys() & document.keys():
        document |= _NEW_IN_2
    check_keys(document, _KEYS, folder)
    if hashlib.sha256(constants).hexdigest() != document["constants_sha256"]:
        raise CorruptFileError(f"constants are not those of the saved graph ({folder}); copy the folder again")
    try:
        return _from_document(document, read_tensors(constants), also, folder)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, SafetensorError, RecursionError) as error:
        if isinstance(error, GraphError):
            raise
        raise CorruptFileError(f"saved graph is not well formed ({folder}: {error})") from error


def _from_document(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], also: Collection[str], folder: Path
) -> Graph:
    def read(key: str, part: Mapping[str, Any]) -> Graph:
        constants = {name[len(_name_in(key, "")) :]: t for name, t in tensors.items() if _is_in(key, name)}
        return graph_from_json(part, constants, partial(_find_operator, also=also), folder)

    for key, part in document["bodies"].items():
        check_keys(part, GRAPH_KEYS, folder)
        body = read(key, part)
        if hash_of_body(body) != key:
            raise CorruptFileError(f"body of a loop is not the one that is meant ({folder}: {key}); save it again")
        register_body(key, body)
    graph = read("", document)
    for key in bodies_in(graph):
        find_body(key)
    return graph


def _name_in(body: str, name: str) -> str:
    return f"{body}.{name}" if body else name


def _is_in(body: str, name: str) -> bool:
    return name.startswith(f"{body}.") if body else "." not in name


def _find_operator(dotted: str, also: Collection[str]) -> Any:
    """The operator of that name, if a saved graph may call it."""
    namespace, _, rest = dotted.partition(".")
    name, _, overload = rest.partition(".")
    if not all(map(_IDENTIFIER.fullmatch, (namespace, name, overload))):
        raise GraphError(f"not the name of an operator ({dotted!r})")
    packet: Any = None
    is_ours = dotted in OPERATORS or dotted in _COLLECTIVES
    if namespace == "aten" or is_ours or dotted in also:
        packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or overload not in packet.overloads():
        raise GraphError(f"operator is not known here ({dotted}); name it in also= if you trust the graph")
    assert packet is not None
    is_core = any(torch.Tag.core in getattr(packet, each).tags for each in packet.overloads())
    if dotted not in also and not is_ours and name not in _KNOWN and not is_core:
        raise GraphError(f"operator is not one that a saved graph may call ({dotted}); name it in also=")
    return getattr(packet, overload)
