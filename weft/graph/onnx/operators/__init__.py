"""ONNX operators in torch: what an imported model may be made of."""

from weft.graph.onnx.operators import elementwise, products, reductions, shapes
from weft.graph.onnx.operators.definition import Definition

__all__ = ["IMPORTS", "Definition"]

IMPORTS: dict[str, Definition] = {**elementwise.TABLE, **reductions.TABLE, **shapes.TABLE, **products.TABLE}
