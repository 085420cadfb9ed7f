"""Types and stored tensors of ONNX as those of torch."""

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from weft.errors import GraphError

__all__ = ["onnx_type", "tensor_of", "torch_type"]

_TYPES = {
    torch.float64: TensorProto.DOUBLE,
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
_BY_NUMBER = {int(number): dtype for dtype, number in _TYPES.items()}


def onnx_type(dtype: torch.dtype) -> int:
    return int(_TYPES[dtype])


def torch_type(number: int) -> torch.dtype:
    if number not in _BY_NUMBER:
        name = TensorProto.DataType.Name(number)
        raise GraphError(f"ONNX model has a type that torch has not (type: {name}); convert the model first")
    return _BY_NUMBER[number]


def tensor_of(stored: onnx.TensorProto) -> Tensor:
    """A tensor of the file. Data beside the file are not read: a path in a file may lead anywhere."""
    if stored.external_data or stored.data_location == TensorProto.EXTERNAL:
        raise GraphError(f"tensor is stored outside the file (name: {stored.name}); save the model in one file")
    dtype = torch_type(stored.data_type)
    array = numpy_helper.to_array(stored)
    if dtype == torch.bfloat16:
        array = array.astype(np.float32)
    return torch.from_numpy(np.array(array)).to(dtype)
