"""ONNX operators in torch: what an imported model may be made of."""

from weft.graph.onnx.operators.definition import Definition
from weft.graph.onnx.operators.elementwise import TABLE as _ELEMENTWISE
from weft.graph.onnx.operators.products import TABLE as _PRODUCTS
from weft.graph.onnx.operators.reductions import TABLE as _REDUCTIONS
from weft.graph.onnx.operators.shapes import TABLE as _SHAPES

__all__ = ["IMPORTS", "Definition"]

IMPORTS: dict[str, Definition] = {**_ELEMENTWISE, **_REDUCTIONS, **_SHAPES, **_PRODUCTS}
