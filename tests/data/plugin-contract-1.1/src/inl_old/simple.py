"""A backend of functions, with ``compile`` as in contract 1.1: three positions."""

from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.dtypes import wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.kernel import Kernel
from inl_old.backend import linear, tensor


def kernels():
    for op in catalog().values():
        if not op.composite:
            yield Kernel(op.name, "body", body_kernel(op, "float32"))


def extra():
    return [Kernel("linear", "old", linear, preference=1)]


def compile_program(function, bucket, consumes):
    return lambda *args: function(*args)


SimpleBackend = simple_backend(
    tensor=tensor,
    numpy=wrap,
    kernels=kernels,
    compile=compile_program,
    traits=Traits(dtypes=("float32",)),
)
