"""ONNX: forward graphs written as files, run by ONNX Runtime, and read back as modules; needs the extra `onnx`."""

from weft.graph.onnx.export import export, graph_to_onnx, to_onnx
from weft.graph.onnx.export_table import EXPORTS
from weft.graph.onnx.module import IMPORTS, OnnxModule, from_onnx, load
from weft.graph.onnx.runtime import OnnxProgram, OnnxRuntimeExecutor

__all__ = [
    "EXPORTS",
    "IMPORTS",
    "OnnxModule",
    "OnnxProgram",
    "OnnxRuntimeExecutor",
    "export",
    "from_onnx",
    "graph_to_onnx",
    "load",
    "to_onnx",
]
