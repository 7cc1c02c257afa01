"""Fusion of a model's kernels, and what came of it."""

from __future__ import annotations

import logging
import time
from importlib import import_module
from typing import Any, NamedTuple

from inl.device import Device
from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating
from inl_toolkit.optimizers.quantize import is_torch_module

STRATEGIES = ("auto", "triton", "compile", "xla", "onednn")


class Fusion(NamedTuple):
    """What :func:`apply_kernel_fusion` did, as ``model.fusion``."""

    strategy: str
    fused: tuple[str, ...]
    """What is compiled as one; empty if nothing is."""
    why_not: str
    """Why nothing was fused, else empty."""
    seconds_before: float | None = None
    """Median of five calls with ``example``; ``None`` without one."""
    seconds_after: float | None = None


@translating
def apply_kernel_fusion(
    model: Any, strategy: str = "auto", *, example: tuple[Any, ...] | None = None
) -> Any:
    """Compile a ``torch.nn.Module`` or a JAX function, and report it.

    strategy: "compile" is torch.compile; "triton" is torch.compile on a GPU, which
    generates Triton kernels; "xla" is ``jax.jit`` of a function; "auto" is what fits
    the model. Where a strategy cannot be used here, the model is returned unchanged
    with the reason, which is logged. example: arguments to measure the gain with. The
    result has a :class:`Fusion` as ``fusion``. Raises
    :class:`~inl.errors.RequestError` for an unknown strategy, and for a model that is
    neither.
    """
    if strategy not in STRATEGIES:
        raise RequestError(
            f"strategy: found {strategy!r:.80}, accepted: {', '.join(STRATEGIES)}"
        )
    module = is_torch_module(model)
    if not module and (not callable(model) or hasattr(model, "parameters")):
        raise RequestError(
            f"apply_kernel_fusion: found {type(model).__name__}, accepted: a "
            "torch.nn.Module, or a function of JAX arrays; kernels of language models "
            "are fused by their backend, see inl explain"
        )
    wanted = ("compile" if module else "xla") if strategy == "auto" else strategy
    if why := _why_not(wanted, module):
        logging.getLogger("inl").warning("fusion by %s: %s", strategy, why)
        return _reported(model, Fusion(strategy, (), why))
    if wanted == "xla":
        compiled = import_module("jax").jit(model)
    else:
        compiled = import_module("torch").compile(model)
    times: tuple[float | None, float | None] = (None, None)
    if example is not None:
        times = (_median(model, example), _median(compiled, example))
    name = getattr(model, "__name__", type(model).__name__)
    return _reported(compiled, Fusion(strategy, (name,), "", *times))


def _why_not(strategy: str, module: bool) -> str:
    if strategy == "xla" and module:
        return "xla compiles functions of JAX arrays, not a torch.nn.Module"
    if strategy != "xla" and not module:
        return f"{strategy} compiles a torch.nn.Module, not a function"
    if strategy == "onednn":
        return "torch uses oneDNN on the CPU by itself; there is nothing to apply"
    if strategy == "triton":
        reason = Device("cuda").why_not()
        return f"needs an NVIDIA GPU: {reason}" if reason else ""
    return ""


def _reported(model: Any, fusion: Fusion) -> Any:
    try:
        model.fusion = fusion
        return model
    except AttributeError:  # a compiled function of JAX
        from functools import wraps

        @wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        call.fusion = fusion  # type: ignore[attr-defined]
        return call


def _median(function: Any, example: tuple[Any, ...]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        result = function(*example)
        if hasattr(result, "block_until_ready"):
            result.block_until_ready()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]  # the first call compiles
