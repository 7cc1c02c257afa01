"""A backend of functions, with those that contract 1.2 added."""

from inl.backend.base import ContextLengths, Traits
from inl.backend.simple import zeroed_state
from inl.dtypes import wrap
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl_vendor.backend import buckets, kernels, np, tensor


def linear(x, w):
    y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def extra():
    return [Kernel("linear", "vendor", linear, preference=1)]


def state(spec, limits):
    def zeros(shape, dtype):
        return np.zeros(shape, np.int32 if dtype == "int32" else np.float32)

    return zeroed_state(spec, limits, zeros, tensor)


def compile_program(function, bucket, consumes, info):
    return lambda *args: function(*args)


SimpleBackend = simple_backend(
    tensor=tensor,
    numpy=wrap,
    kernels=kernels,
    compile=compile_program,
    buckets=buckets,
    message=tensor,
    state=state,
    capabilities=[ContextLengths(lambda limits: [32])],
    traits=Traits(dtypes=("float32",), block_size=8),
)
