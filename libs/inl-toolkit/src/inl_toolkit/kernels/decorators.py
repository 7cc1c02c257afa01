"""Decorators that compile a function for a kind of device."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any, overload

from inl.device import Device
from inl.errors import BackendUnavailable, KernelError, RequestError
from inl_toolkit.functional.dynamics import framework_of
from inl_toolkit.functional.out_of_memory import check_memory
from inl_toolkit.kernels.compiling import compiled_by, is_structure
from inl_toolkit.kernels.config import KernelConfig, in_force, make_config
from inl_toolkit.kernels.profile import recorded

Function = Callable[..., Any]
GPU = ("cuda", "rocm")


class DecoratedKernel:
    """A function that runs on a kind of device.

    JAX arrays are compiled by XLA and moved to the device; torch tensors are moved to a
    GPU and compiled by torch.compile there; NumPy arrays are computed by NumPy. Where
    the device is absent, see ``KernelConfig.fallback``.
    """

    def __init__(
        self,
        function: Function,
        platforms: tuple[str, ...],
        config: KernelConfig,
        *,
        has_structure: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.platforms, self.config = function, platforms, config
        self.has_structure = has_structure
        """Whether arrays of integers say where blocks are: constants of programs, which
        stay where they are."""
        self.compiled: dict[str, Function] = {}
        """Compiled function by framework."""
        self.notes: list[str] = []
        """What was asked for and has no effect here, as sentences."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._call(args, kwargs)
        except (MemoryError, RuntimeError) as error:
            check_memory(self.function.__name__, error)
            raise
        if result is None:
            raise KernelError(
                f"{self.function.__name__}: returned None; accepted: a function that "
                "returns its results"
            )
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrays = [x for x in (*args, *kwargs.values()) if hasattr(x, "shape")]
        framework = _framework(self.function.__name__, arrays)
        target = self._target(framework)
        run = self._compiled(framework, target)
        if target is not None:
            args = tuple(self._moved(each, target) for each in args)
            kwargs = {name: self._moved(each, target) for name, each in kwargs.items()}

        def call() -> Any:
            with in_force(self.config), self._tensor_cores(framework, target, arrays):
                return run(*args, **kwargs)

        first = arrays[0] if arrays else None
        return recorded(self.function.__name__, first, call)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind a method to its object, which is a constant of compiled programs."""
        return self if owner is None else MethodType(self, owner)

    def configure(self, config: KernelConfig) -> None:
        """Replace the configuration; what was compiled with the old one is dropped."""
        self.config = config
        self.compiled.clear()

    def why_not(self) -> str | None:
        """Return why no device of the kind can be used, or ``None``."""
        if "cpu" in self.platforms:
            return None
        reasons = {name: Device(name).why_not() for name in self.platforms}
        if None in reasons.values():
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def _target(self, framework: str) -> Any:
        """Return the framework's device to move to; ``None``: leave arrays in place."""
        target = _devices(framework, self.platforms)
        if target is not None or "cpu" in self.platforms:
            return target
        why = self.why_not() or f"{framework} arrays cannot be on this kind of device"
        if self.config.fallback == "error":
            raise BackendUnavailable(f"{self.function.__name__}: {why}")
        self._note(f"runs where its arguments are, not on {self.platforms[0]}: {why}")
        return None

    def _compiled(self, framework: str, target: Any) -> Function:
        if not self.config.auto_optimize:
            return self.function
        if framework != "jax" and (framework != "torch" or target is None):
            return self.function
        if framework not in self.compiled:
            self.compiled[framework] = compiled_by(
                framework, self.function, has_structure=self.has_structure,
                note=self._note,
            )  # fmt: skip
        return self.compiled[framework]

    @contextmanager
    def _tensor_cores(
        self, framework: str, target: Any, arrays: list[Any]
    ) -> Iterator[None]:
        """Round float32 products to TF32 inside, if that is configured."""
        wanted = self.config.use_tensor_cores
        if wanted and not _on_nvidia(framework, target, arrays):
            self._note("use_tensor_cores has no effect without an NVIDIA GPU")
            wanted = False
        if wanted and framework == "jax":
            with import_module("jax").default_matmul_precision("tensorfloat32"):
                yield
        elif wanted:
            torch = import_module("torch")
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)
        else:
            yield

    def _moved(self, value: Any, target: Any) -> Any:
        if self.has_structure and is_structure(value):
            return value
        return _moved(value, target)

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
            name = self.function.__name__
            logging.getLogger("inl").warning("kernel %s %s", name, sentence)


def _framework(name: str, arrays: list[Any]) -> str:
    """Return the framework of the arrays; those of NumPy may be beside another's."""
    try:
        found = [framework_of(name, "x", each) for each in arrays]
    except RequestError as error:
        raise KernelError(str(error)) from error
    others = [each for each in found if each != "numpy"]
    if len({*others}) > 1:
        listed = " and ".join(dict.fromkeys(others))
        raise KernelError(
            f"{name}: found arrays of {listed}, accepted: arrays of one framework"
        )
    return others[0] if others else "numpy"


def _on_nvidia(framework: str, target: Any, arrays: list[Any]) -> bool:
    """Whether a call computes on a GPU of NVIDIA."""
    if framework == "torch":
        places = [target] if target is not None else [x.device for x in arrays]
        is_rocm = import_module("torch").version.hip is not None
        kinds = (getattr(place, "type", "cpu") for place in places)
        return not is_rocm and "cuda" in kinds
    if framework == "jax":
        devices = [target] if target is not None else import_module("jax").devices()
        return devices[0].platform == "gpu" and "NVIDIA" in devices[0].device_kind
    return False


def _devices(framework: str, platforms: tuple[str, ...]) -> Any:
    """Return the first device of the framework on one of the platforms, or ``None``."""
    if framework == "jax":
        jax = import_module("jax")
        for platform in platforms:
            try:
                return jax.devices(platform)[0]
            except RuntimeError:
                continue
    if framework == "torch":
        torch = import_module("torch")
        if any(name in GPU for name in platforms) and torch.cuda.is_available():
            return torch.device("cuda")
        if platforms == ("cpu",):
            return torch.device("cpu")
    return None


def _moved(value: Any, target: Any) -> Any:
    """Move an array; what is no array, or NumPy's beside tensors, stays."""
    if hasattr(value, "to"):
        return value.to(target)
    if not hasattr(value, "shape") or hasattr(target, "type"):
        return value
    traced = type(value).__name__.endswith("Tracer")
    if not traced and hasattr(value, "devices") and target in value.devices():
        return value
    return import_module("jax").device_put(value, target)


def _decorator(
    where: str,
    platforms: tuple[str, ...],
    function: Any,
    config: Any,
    given: Any,
    has_structure: bool = False,
) -> Any:
    made = make_config(where, config, given)

    def decorate(function: Any) -> DecoratedKernel:
        if not callable(function):
            raise KernelError(f"{where}: found {function!r:.80}, accepted: a function")
        return DecoratedKernel(function, platforms, made, has_structure=has_structure)

    return decorate if function is None else decorate(function)


Decorator = Callable[[Function], DecoratedKernel]


@overload
def tpu_kernel(function: Function, /) -> DecoratedKernel: ...
@overload
def tpu_kernel(*, config: KernelConfig | None = None, **given: Any) -> Decorator: ...
def tpu_kernel(
    function: Function | None = None,
    /,
    *,
    config: KernelConfig | None = None,
    **given: Any,
) -> DecoratedKernel | Decorator:
    """Run a function on a TPU: ``@tpu_kernel`` or ``@tpu_kernel(block_size=128)``.

    Keywords are fields of :class:`~inl.kernels.KernelConfig`; raises
    :class:`~inl.errors.KernelError` for others, and
    :class:`~inl.errors.BackendUnavailable` as ``fallback`` says.
    """
    return _decorator("tpu_kernel", ("tpu",), function, config, given)  # type: ignore[no-any-return]


def gpu_kernel(
    function: Function | None = None,
    /,
    *,
    config: KernelConfig | None = None,
    use_flash: bool | None = None,
    **given: Any,
) -> Any:
    """Run a function on a GPU; as :func:`tpu_kernel`.

    use_flash: another name of ``use_efficient_attention``.
    """
    if use_flash is not None:
        given["use_efficient_attention"] = use_flash
    return _decorator("gpu_kernel", GPU, function, config, given)


def cpu_kernel(
    function: Function | None = None,
    /,
    *,
    config: KernelConfig | None = None,
    **given: Any,
) -> Any:
    """Run a function on the CPU; as :func:`tpu_kernel`."""
    return _decorator("cpu_kernel", ("cpu",), function, config, given)


def sparse_kernel(
    function: Function | None = None,
    /,
    *,
    platform: str = "cpu",
    config: KernelConfig | None = None,
    **given: Any,
) -> Any:
    """Run a function of block-sparse operands on a platform: "tpu", "gpu" or "cpu".

    ``block_size`` is also the required size of the blocks in the function's second
    argument [..., b, b]; a call with another raises :class:`~inl.errors.KernelError`.
    Arrays of integers, such as indices, are read before the function is compiled: it is
    compiled again for others.
    """
    size = make_config("sparse_kernel", config, given).block_size

    def refuse(sparse_values: Any) -> str | None:
        found = _shape("sparse_values", sparse_values)[-2:]
        if size is None or found == (size, size):
            return None
        return f"sparse_values: found blocks of {list(found)}, accepted: {[size, size]}"

    where = "sparse_kernel", platform
    return _of_checked_operand(
        where, refuse, function, config, given, has_structure=True
    )


def expert_kernel(
    function: Function | None = None,
    /,
    *,
    platform: str = "cpu",
    num_experts: int | None = None,
    config: KernelConfig | None = None,
    **given: Any,
) -> Any:
    """Run a function of expert weights on ``platform``: "tpu", "gpu" or "cpu".

    num_experts: required first size of the function's second argument; a call with
    another raises :class:`~inl.errors.KernelError`.
    """

    def refuse(expert_weights: Any) -> str | None:
        (found, *_) = _shape("expert_weights", expert_weights) or (0,)
        if num_experts in (None, found):
            return None
        return f"expert_weights: found {found} experts, accepted: {num_experts}"

    where = "expert_kernel", platform
    return _of_checked_operand(where, refuse, function, config, given)


def _of_checked_operand(
    where: tuple[str, str],
    refuse: Callable[[Any], str | None],
    function: Function | None,
    config: KernelConfig | None,
    given: dict[str, Any],
    *,
    has_structure: bool = False,
) -> Any:
    """Decorate a function whose second argument is checked at each call.

    where: name of the decorator, and platform.
    """
    name, platform = where
    platforms = _platforms(name, platform)

    def decorate(function: Function) -> Any:
        parameters = _parameters(name, function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            second = parameters.bind(*args, **kwargs).args[1]
            if why := refuse(second):
                raise KernelError(f"{function.__name__}: {why}")
            return function(*args, **kwargs)

        return _decorator(name, platforms, call, config, given, has_structure)

    return decorate if function is None else decorate(function)


def _shape(name: str, value: Any) -> tuple[int, ...]:
    """Return the shape of an array, or of the first of several."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if not hasattr(first, "shape"):
        raise KernelError(
            f"{name}: found {type(value).__name__}, accepted: an array, or several"
        )
    return tuple(first.shape)


def _parameters(where: str, function: Function) -> inspect.Signature:
    found = inspect.signature(function) if callable(function) else None
    if found is None or len(found.parameters) < 2:
        raise KernelError(
            f"{where}: found {function!r:.80}, accepted: a function of two arrays or "
            "more"
        )
    return found


def _platforms(where: str, platform: str) -> tuple[str, ...]:
    known = {"tpu": ("tpu",), "gpu": GPU, "cpu": ("cpu",)}
    if platform not in known:
        raise KernelError(
            f"{where}: platform: found {platform!r:.80}, accepted: {', '.join(known)}"
        )
    return known[platform]
