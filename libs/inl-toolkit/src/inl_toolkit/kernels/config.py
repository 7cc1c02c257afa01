"""Configuration of kernels, and the one in force while a decorated function runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from inl.errors import KernelError

PRECISIONS = ("default", "high", "highest", "bfloat16", "float16", "float8_e4m3fn")
"""Accepted precisions of products."""

FALLBACKS = ("auto", "error")


def _precision(value: Any) -> str:
    name = str(getattr(value, "name", value)).lower()
    if name not in PRECISIONS:
        raise _refused("precision", value, ", ".join(PRECISIONS))
    return name


def _refused(field: str, found: object, accepted: str) -> KernelError:
    return KernelError(
        f"KernelConfig: {field}: found {found!r:.200}, accepted: {accepted}"
    )


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Settings of a decorated function and of the kernels that it calls.

    Raises :class:`~inl.errors.KernelError` for a value that is not accepted.
    """

    block_size: int | None = None
    """Tile of attention and of the summed axis of products; ``None``: attention 128,
    products undivided."""
    use_bfloat16: bool = False
    """Round the inputs of products to bfloat16; sums are float32."""
    use_fp16: bool = False
    """Round the inputs of products to float16; sums are float32."""
    precision: Any = "default"
    """Of products. "default": that of the arrays. "high", "highest": float32 on every
    device. "bfloat16", "float16", "float8_e4m3fn": inputs are rounded to it, the last
    with one scale per array. Also a member of JAX's or XLA's precision enumerations."""
    use_efficient_attention: bool = True
    """Whether attention runs by tiles, in memory that does not grow with the
    context."""
    use_fused_ops: bool = True
    """Whether layer normalization is the fused function of torch or XLA."""
    use_tensor_cores: bool = False
    """Whether float32 products on NVIDIA GPUs may round their inputs to TF32; elsewhere
    it has no effect, which ``notes`` says."""
    auto_optimize: bool = True
    """Whether the function is compiled: by XLA for JAX arrays, by torch.compile for
    tensors on a GPU."""
    fallback: str = "auto"
    """Where the device is absent: "auto" runs on the device of the arguments and logs
    it once, "error" raises."""

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and (type(size) is not int or not 0 < size < 2**31):
            raise _refused("block_size", size, "a whole number above 0, or None")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(field.default) is bool and type(value) is not bool:
                raise _refused(field.name, value, "True or False")
        object.__setattr__(self, "precision", _precision(self.precision))
        if self.fallback not in FALLBACKS:
            raise _refused("fallback", self.fallback, ", ".join(FALLBACKS))
        chosen = [self.use_bfloat16, self.use_fp16, self.precision in PRECISIONS[3:]]
        if sum(chosen) > 1:
            names = ("use_bfloat16", "use_fp16", self.precision)
            found = [name for name, on in zip(names, chosen, strict=True) if on]
            accepted = "one of bfloat16, float16 and float8"
            raise _refused("precision", ", ".join(found), accepted)

    @property
    def rounding(self) -> str:
        """Dtype that inputs of products are rounded to; "" if they are not."""
        if self.use_bfloat16 or self.use_fp16:
            return "bfloat16" if self.use_bfloat16 else "float16"
        return str(self.precision) if self.precision in PRECISIONS[3:] else ""


_in_force: ContextVar[KernelConfig] = ContextVar("inl.kernels")
"""Not set outside of decorated functions."""


_DEFAULT = KernelConfig()


def configured(**given: Any) -> KernelConfig:
    """Return the configuration in force, changed by arguments that are not ``None``."""
    changes = {name: value for name, value in given.items() if value is not None}
    config = _in_force.get(_DEFAULT)
    return replace(config, **changes) if changes else config


@contextmanager
def in_force(config: KernelConfig) -> Iterator[None]:
    """Set the configuration of the kernels that are called inside."""
    token = _in_force.set(config)
    try:
        yield
    finally:
        _in_force.reset(token)


def make_config(where: str, config: KernelConfig | None, given: Any) -> KernelConfig:
    """Return ``config``, or the default one, with fields changed; refuses others."""
    if config is not None and not isinstance(config, KernelConfig):
        raise KernelError(
            f"{where}: config: found {type(config).__name__}, accepted: KernelConfig"
        )
    known = [field.name for field in fields(KernelConfig)]
    unknown = sorted({*given} - {*known})
    if unknown:
        raise KernelError(
            f"{where}: found {', '.join(unknown)}, accepted: {', '.join(known)}"
        )
    return replace(config or KernelConfig(), **given)
