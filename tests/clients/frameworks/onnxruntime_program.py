"""ONNX Runtime: a matrix product and a convolution."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def constant(name, *shape):
    return helper.make_tensor(name, FLOAT, shape, np.ones(shape, np.float32).tobytes(), raw=True)


shapes = {"x": (64, 1024), "i": (2, 3, 64, 64), "y": (64, 1024), "c": (2, 16, 62, 62)}
value = {name: helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in shapes.items()}
nodes = [helper.make_node("MatMul", ["x", "W"], ["y"]), helper.make_node("Conv", ["i", "K"], ["c"])]
weights = [constant("W", 1024, 1024), constant("K", 16, 3, 3, 3)]
graph = helper.make_graph(nodes, "g", [value["x"], value["i"]], [value["y"], value["c"]], weights)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
model.ir_version = 9
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
found = session.run(["y", "c"], {name: np.ones(shapes[name], np.float32) for name in ("x", "i")})
print(session.get_providers()[0], [a.shape for a in found])
