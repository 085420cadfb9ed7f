"""ONNX: forward graphs written as files, run by ONNX Runtime, and read back as modules; needs the extra `onnx`."""

from weft.graph.onnx.export import export, graph_to_onnx, to_onnx
from weft.graph.onnx.export_table import EXPORTS
from weft.graph.onnx.program import OnnxProgram, OnnxRuntimeExecutor

__all__ = ["EXPORTS", "OnnxProgram", "OnnxRuntimeExecutor", "export", "graph_to_onnx", "to_onnx"]
