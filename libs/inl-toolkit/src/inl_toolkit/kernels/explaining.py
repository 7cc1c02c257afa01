"""Which kernel computes a call of a function on arrays, and why not the others."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from inl.device import Device
from inl.errors import BackendUnavailable, KernelError, MissingPackage, RequestError
from inl.install_command import install_command
from inl.spec.explained import RECORDS, Selection, recording

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "i32": "int32", "i64": "int64",
}  # fmt: skip
"""Short names of dtypes in a call; the names of the frameworks are accepted too."""

FUNCTIONS = {
    "gemm": "inl.kernels", "flash_attention": "inl.kernels",
    "layer_norm": "inl.kernels", "apply_rope": "inl.kernels",
    "block_sparse_matmul": "inl.kernels", "moe_dispatch": "inl.kernels",
    "inl_dynamics": "inl.functional.dynamics",
    "inl_dynamics_step": "inl.functional.dynamics",
    "inl_dynamics_n_steps": "inl.functional.dynamics",
}  # fmt: skip
"""Functions that a call may name, and their modules; ``quantized_linear`` besides."""

FORMATS = ("bf16", "fp16", "fp8", "int8", "int4")
FRAMEWORKS = ("numpy", "torch", "jax")
MOST_ELEMENTS = 2**31


class Explanation(NamedTuple):
    """What a call selected."""

    call: str
    device: str
    framework: str
    selections: tuple[Selection, ...]
    """In the order in which parts of the call were computed."""
    launched: tuple[str, ...] = ()
    """Of torch: the kernels of a GPU that its profiler saw in one more call, or the ops
    that it dispatched on a CPU."""

    def describe(self) -> str:
        """Return the lines that ``inl explain --call`` prints."""
        lines = [f"{self.call}: {self.framework} on {self.device}"]
        for each in self.selections:
            lines.append(f"{each.kernel}: {each.precision}")
            lines += [f"  not {name}: {why}" for name, why in each.refusals]
        if self.launched:
            lines.append("launched:")
            lines += [f"  {name}" for name in self.launched]
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call a function of :mod:`inl.kernels` or :mod:`inl.functional`, and report it.

    The call computes, so that what is reported is what ran: with the arrays' dtypes,
    shapes, device and gradients. Raises what the call raises.
    """
    first = next((each for each in args if hasattr(each, "dtype")), None)
    if first is None:
        raise RequestError("explain: found no array among the arguments, accepted: one")
    from inl_toolkit.functional.dynamics import framework_of
    from inl_toolkit.kernels.profile import device_of

    framework = framework_of("explain", "arguments", first)
    with recording() as selections:
        function(*args, **kwargs)
    assert not RECORDS, "calls that are explained are not nested"
    launched: tuple[str, ...] = ()
    if framework == "torch":
        launched = _launched(lambda: function(*args, **kwargs), device_of(first))
    name = getattr(function, "__name__", type(function).__name__)
    return Explanation(name, device_of(first), framework, tuple(selections), launched)


def explain_call(
    call: str, device: str = "auto", framework: str | None = None
) -> Explanation:
    """Report the kernels of a call that is written with shapes for arrays.

    call: such as ``gemm(f16[64,64], f16[64,64], use_fp16=True)``; arrays are random
    numbers. Other arguments are numbers, strings, booleans, ``None`` and lists of them.
    ``quantized_linear(bf16[8,4096], "int8", outputs=4096)`` is the layer of
    :func:`~inl.optimizers.quantize_for_inference`. device: a name, or "auto".
    framework: "numpy", "torch" or "jax"; by default torch on CPUs and GPUs, where it is
    installed, and jax on TPUs. Raises :class:`~inl.errors.RequestError` for a call that
    cannot be read, :class:`~inl.errors.BackendUnavailable` for a device that is absent,
    and what the call raises.
    """
    name, args, kwargs = parsed(call)
    place = _device(device)
    chosen = framework or _framework(place)
    if chosen not in FRAMEWORKS:
        raise RequestError(
            f"framework: found {chosen!r:.80}, accepted: {', '.join(FRAMEWORKS)}"
        )
    with _arrays_on(place, chosen) as make:

        def filled(value: Any) -> Any:
            if isinstance(value, Shaped):
                return make(value)
            return [filled(each) for each in value] if type(value) is list else value

        given = [filled(each) for each in args]
        named = {key: filled(each) for key, each in kwargs.items()}
        if name == "quantized_linear":
            function, given, named = _quantized(chosen, given, named)
        else:
            function = getattr(import_module(FUNCTIONS[name]), name)
        try:
            report = explain(function, *given, **named)
        except TypeError as error:
            raise RequestError(f"call: {call:.200}: {error}") from error
    return report._replace(call=call, device=str(place))


class Shaped(NamedTuple):
    """An array of a call: a dtype and a shape."""

    dtype: str
    shape: tuple[int, ...]


def parsed(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the function's name, its arguments and its keywords."""
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(call) from error
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise _unreadable(call)
    known = (*FUNCTIONS, "quantized_linear")
    if tree.func.id not in known:
        raise RequestError(
            f"call: found {tree.func.id!r:.80}, accepted: {', '.join(known)}"
        )
    named = {each.arg: _value(each.value) for each in tree.keywords if each.arg}
    if len(named) < len(tree.keywords):
        raise _unreadable(call)
    return tree.func.id, [_value(each) for each in tree.args], named


def _unreadable(call: str) -> RequestError:
    return RequestError(
        f"call: found {call!r:.200}, accepted: such as "
        "gemm(f16[64,64], f16[64,64], use_fp16=True)"
    )


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    text = ast.unparse(node)
    if not isinstance(node, ast.Subscript):
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise _no_value(text) from None
    kind = DTYPES.get(ast.unparse(node.value), ast.unparse(node.value))
    if kind not in DTYPES.values():
        raise RequestError(
            f"call: {text:.80}: dtype: found {kind!r:.40}, accepted: "
            f"{', '.join((*DTYPES, *DTYPES.values()))}"
        )
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    sizes = [each.value if isinstance(each, ast.Constant) else None for each in parts]
    if any(type(each) is not int or each < 1 for each in sizes):
        raise _no_value(text)
    shape = tuple(int(str(each)) for each in sizes)
    if np.prod([float(each) for each in shape]) > MOST_ELEMENTS:
        raise RequestError(
            f"call: {text:.80}: accepted: up to {MOST_ELEMENTS} elements"
        )
    return Shaped(kind, shape)


def _no_value(text: str) -> RequestError:
    return RequestError(
        f"call: found {text:.80}, accepted: arrays such as f16[64,64], and constants"
    )


def _device(name: str) -> Device:
    from inl.plugin import choose_device

    place = choose_device(name)
    if reason := place.why_not():
        raise BackendUnavailable(f"{place}: {reason}")
    return place


def _framework(place: Device) -> str:
    if str(place.type) == "tpu":
        return "jax"
    if str(place.type) != "cpu":
        return "torch"
    try:
        import_module("inl_torch")
        import_module("torch")
    except ImportError:
        return "numpy"
    return "torch"


@contextmanager
def _arrays_on(place: Device, framework: str) -> Iterator[Callable[[Shaped], Any]]:
    """Give a function that makes arrays of random numbers on a device."""
    kind, index = str(place.type), place.index
    rng = np.random.default_rng(0)
    if framework == "numpy":
        if kind not in ("cpu", "reference"):
            raise BackendUnavailable(f"{place}: NumPy computes on cpu only")

        def on_host(value: Shaped) -> Any:
            if value.dtype == "bfloat16":
                raise KernelError("call: NumPy has no bfloat16; accepted: torch or jax")
            return _numbers(rng, value).astype(value.dtype)

        yield on_host
        return
    try:
        module: Any = import_module(framework)
        import_module(f"inl_{framework}")
    except ImportError as error:
        hint = install_command(f"inl-{framework}")
        raise MissingPackage(f"arrays of {framework}: {hint}") from error
    if framework == "torch":
        # ROCm's devices are "cuda" to torch.
        where = "cpu" if kind == "cpu" else f"{'cuda' if kind == 'rocm' else kind}"
        where = where if kind == "cpu" else f"{where}:{index}"

        def on_torch(value: Shaped) -> Any:
            dtype, generator = getattr(module, value.dtype), module.Generator(where)
            size = value.shape
            if value.dtype.startswith("int"):
                return module.zeros(size, dtype=dtype, device=where)
            return module.randn(
                size, dtype=dtype, device=where, generator=generator.manual_seed(0)
            )

        yield on_torch
        return
    platform = "gpu" if kind in ("cuda", "rocm") else kind
    try:
        device = module.devices(platform)[index]
    except (RuntimeError, IndexError) as error:
        raise BackendUnavailable(f"{place}: JAX: {error}"[:300]) from error

    def on_jax(value: Shaped) -> Any:
        return module.device_put(
            module.numpy.asarray(_numbers(rng, value), value.dtype), device
        )

    with module.default_device(device):
        yield on_jax


def _numbers(rng: np.random.Generator, value: Shaped) -> Any:
    if value.dtype.startswith("int"):
        return np.zeros(value.shape, value.dtype)
    return rng.standard_normal(value.shape, np.float32)


def _quantized(
    framework: str, given: list[Any], named: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return a layer of quantize_for_inference, and its input."""
    accepted = 'accepted: quantized_linear(bf16[8,4096], "int8", outputs=4096) of torch'
    x, *rest = given or [None]
    kind = named.pop("dtype", rest[0] if rest else None)
    outputs = named.pop("outputs", None if x is None else x.shape[-1])
    is_known = framework == "torch" and hasattr(x, "shape") and kind in FORMATS
    if not is_known or named or len(rest) > 1 or type(outputs) is not int:
        raise RequestError(f"call: quantized_linear: found {kind!r:.40}; {accepted}")
    torch: Any = import_module("torch")
    from inl.optimizers import quantize_for_inference

    layer = torch.nn.Linear(x.shape[-1], outputs, bias=False, device=x.device)
    (quantized,) = quantize_for_inference(layer, str(kind))
    return torch.no_grad()(quantized.forward), [x], {}


def _launched(run: Callable[[], Any], device: str) -> tuple[str, ...]:
    """Return the kernels of a GPU that torch's profiler sees, or the ops of a CPU.

    Each is listed once, in the order of the first.
    """
    if not device.startswith("cuda"):
        return _dispatched(run)
    profiler: Any = import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        run()
        import_module("torch").cuda.synchronize()
    events = (each for each in profile.events() if "CUDA" in str(each.device_type))
    return tuple(dict.fromkeys(each.name for each in events))


def _dispatched(run: Callable[[], Any]) -> tuple[str, ...]:
    mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode
    names: list[str] = []

    class Listing(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, op: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(op))
            return op(*args, **(kwargs or {}))

    with Listing():
        run()
    return tuple(dict.fromkeys(names))
