"""Mixture-of-experts functions on NumPy, torch and JAX arrays.

Results are of the same framework. torch and JAX compute on the arrays' device, with
gradients; NumPy arrays are computed by the ops' bodies. Under transformations of JAX,
where arrays have no values, only their shapes are validated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import FLOATS
from inl.errors import RequestError
from inl.spec.explained import refuse, report
from inl_toolkit.functional.dynamics import discovery, framework_of, functions_of
from inl_toolkit.functional.out_of_memory import translating

if TYPE_CHECKING:
    from inl.spec.functions import Functions


class Dispatched(NamedTuple):
    """Routing of the tokens of a batch."""

    ids: Any
    """int32 [T, k]: experts, best first."""
    weights: Any
    """float32 [T, k]: 0 for experts that were full."""


@translating
def route(
    router_logits: Any, *, k: int, kind: str = "softmax_topk", renormalize: bool = True
) -> Dispatched:
    """Choose the top ``k`` experts of each token from ``router_logits`` [T, E].

    kind: one of :data:`inl.ops.moe.KINDS`. renormalize: whether the weights of a token
    sum to 1. Raises :class:`RequestError` for a k outside 1 to E, and for NaN.
    """
    _check_logits(router_logits, k, kind)
    attrs = {"k": k, "kind": kind, "renormalize": renormalize}
    return Dispatched(*_call("route", router_logits, **attrs))


@translating
def experts(
    inputs: Any,
    ids: Any,
    weights: Any,
    expert_weights: Any,
    *,
    activation: str = "silu",
) -> Any:
    """Apply experts ``ids`` [T, k] to ``inputs`` [T, H] and sum by ``weights`` [T, k].

    expert_weights: gate [E, I, H], up [E, I, H] and down [E, H, I], or one array
    [E, N, H] of plain matrices. Returns [T, H] or [T, N]. No token is dropped. Raises
    :class:`RequestError` for shapes that do not match or an id outside 0 to E - 1.
    """
    _check_arrays("experts", inputs=inputs, ids=ids, weights=weights)
    matrices = _matrices(inputs, expert_weights)
    count = matrices[0].shape[0]
    if tuple(ids.shape) != tuple(weights.shape) or ids.shape[0] != inputs.shape[0]:
        raise RequestError(
            f"experts: found ids {list(ids.shape)} and weights {list(weights.shape)} "
            f"for {inputs.shape[0]} tokens, accepted: both [tokens, k]"
        )
    if _has_values(ids) and bool(((ids < 0) | (ids >= count)).any()):
        raise RequestError(f"experts: an id is outside 0 to {count - 1}")
    return _apply(inputs, ids, weights, matrices, activation)


@translating
def moe_dispatch(
    inputs: Any,
    router_logits: Any,
    expert_weights: Any,
    *,
    k: int = 2,
    capacity_factor: float = 1.0,
    kind: str = "softmax_topk",
    activation: str = "silu",
) -> Any:
    """Route ``inputs`` [T, H] by ``router_logits`` [T, E], with limited capacity.

    An expert takes the first ``floor(T * capacity_factor * k / E)`` tokens and drops
    later ones; the weights of a token's other experts are scaled to sum to 1. A token
    that all its experts drop gives zeros. expert_weights: as in :func:`experts`. Raises
    :class:`RequestError` for a k outside 1 to E, a factor not above 0, shapes that do
    not match, and NaN in ``router_logits``.
    """
    _check_arrays("moe_dispatch", inputs=inputs, router_logits=router_logits)
    matrices = _matrices(inputs, expert_weights)
    shape = inputs.shape[0], matrices[0].shape[0]
    if tuple(router_logits.shape) != shape:
        raise RequestError(
            f"moe_dispatch: router_logits: found {list(router_logits.shape)}, "
            f"accepted: {list(shape)}, tokens and experts"
        )
    dispatched = capacity(
        route(router_logits, k=k, kind=kind), shape[1], capacity_factor=capacity_factor
    )
    return _apply(inputs, *dispatched, matrices, activation)


@translating
def capacity(
    dispatched: Dispatched, experts: int, *, capacity_factor: float
) -> Dispatched:
    """Drop the tokens beyond each expert's capacity: set their weights to 0.

    experts: number of experts.
    """
    from inl.ops.moe_dispatch import capacity_of

    if not isinstance(dispatched, tuple) or len(dispatched) != 2:
        raise RequestError(
            f"capacity: dispatched: found {type(dispatched).__name__}, accepted: what "
            "route returns"
        )
    if type(experts) is not int or not 0 < experts < 2**31:
        raise RequestError(
            f"capacity: experts: found {experts!r:.80}, accepted: 1 or more"
        )
    ids, weights = dispatched
    limit = capacity_of(ids.shape[0], experts, ids.shape[1], capacity_factor)
    attrs = {"experts": experts, "capacity": limit}
    return Dispatched(ids, _call("drop_overflow", ids, weights, **attrs))


@translating
def load_balance_loss(router_logits: Any, *, k: int = 1) -> Any:
    """Load-balancing loss of ``router_logits`` [T, E]: 1 if balanced, E at worst.

    A scalar: E times the sum over experts of the share of choices times the mean
    probability. Raises :class:`RequestError` for a k outside 1 to E, and for NaN.
    """
    _check_logits(router_logits, k)
    return _call("load_balance_loss", router_logits, k=k)


def _check_logits(logits: Any, k: int, *kind: str) -> None:
    from inl.ops.moe import check_routing

    _check_arrays("route", router_logits=logits)
    if len(logits.shape) != 2 or 0 in logits.shape:
        raise RequestError(
            f"router_logits: found {list(logits.shape)}, accepted: [tokens, experts]"
        )
    check_routing(logits.shape[-1], k, *kind)
    if not _has_values(logits):
        return
    invalid = (logits != logits).any(-1)  # NaN, in any framework
    if bool(invalid.any()):
        first = next(row for row in range(invalid.shape[0]) if bool(invalid[row]))
        raise RequestError(
            f"router_logits: found NaN in row {first}, accepted: numbers"
        )


def _check_arrays(where: str, **arrays: Any) -> None:
    for name, each in arrays.items():
        if not hasattr(each, "shape"):
            raise RequestError(
                f"{where}: {name}: found {type(each).__name__}, accepted: an array of "
                "NumPy, torch or JAX"
            )


def _has_values(array: Any) -> bool:
    is_traced = functions_of(framework_of("moe", "inputs", array)).is_traced
    return is_traced is None or not is_traced(array)


def _matrices(inputs: Any, given: Any) -> tuple[Any, ...]:
    """Validate expert weights against inputs [T, H] and return them as a tuple."""
    matrices = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for one in matrices:
        _check_arrays("experts", expert_weights=one)
    shapes = [tuple(one.shape) for one in matrices]
    if len(inputs.shape) == 2 and shapes and len(shapes[0]) == 3:
        count, inner, hidden = *shapes[0][:2], inputs.shape[1]
        wide, narrow = (count, inner, hidden), (count, hidden, inner)
        if shapes in ([wide], [wide, wide, narrow]):
            return matrices
    raise RequestError(
        f"expert_weights: found {', '.join(str(list(one)) for one in shapes)} for "
        f"inputs {list(inputs.shape)}, accepted: gate and up [E, I, H] and down "
        "[E, H, I], or one array [E, N, H], for inputs [T, H]"
    )


def _apply(
    inputs: Any, ids: Any, weights: Any, matrices: tuple[Any, ...], activation: str
) -> Any:
    from inl.ops.mlp import ACTIVATIONS
    from inl.ops.moe import ExpertLinear, Experts

    if activation not in ACTIVATIONS:
        raise RequestError(
            f"activation: found {activation!r}, accepted: {', '.join(ACTIVATIONS)}"
        )
    if len(matrices) == 1:
        slots = inputs.reshape(inputs.shape[0], 1, inputs.shape[1])
        y = _call("expert_linear", slots, ids, ExpertLinear(*matrices))
        return _call("combine_experts", y, weights)
    group = Experts(*matrices)
    return _call("experts", inputs, ids, weights, group, activation=activation)


def _call(name: str, *args: Any, **attrs: Any) -> Any:
    """Run an op with the framework of the first argument."""
    framework = framework_of(name, "inputs", args[0])
    if _import_ops(framework):
        report(f"{name}/{framework}", f"{str(args[0].dtype).rpartition('.')[2]} rows")
        return _ops[framework][name](*args, **attrs)
    refuse(f"{name}/{framework}", "has no kernels of mixtures of experts")
    report(f"{name}/numpy on the host", "float32, or float64 of such arrays")
    return _on_host(functions_of(framework), name, args, attrs)


_ops: dict[str, Mapping[str, Callable[..., Any]]] = {}
"""Imported ops by framework and name; filled by :func:`_import_ops`."""


@discovery
def _import_ops(framework: str) -> bool:
    """Import the ops of a framework; returns whether it has any."""
    from inl.spec.dispatch import DynamicOps

    kernels = functions_of(framework).kernels
    if kernels is not None and framework not in _ops:
        listed = tuple(kernels())
        composed = {"experts": DynamicOps(listed).experts}
        _ops[framework] = composed | {kernel.op: kernel.run for kernel in listed}
    return kernels is not None


def _on_host(
    own: Functions, name: str, args: tuple[Any, ...], attrs: dict[str, Any]
) -> Any:
    from inl.backend.reference import ReferenceBackend
    from inl.device import Device
    from inl.spec.dispatch import DynamicOps
    from inl.spec.op import CATALOG
    from inl.spec.tree import leaves, tree_map

    kinds = {str(leaf.dtype) for leaf in leaves(args)}
    wide = "float64" if "float64" in kinds else "float32"

    def fetch(leaf: Any) -> Any:
        # Half types of all frameworks are computed in float32.
        floating = str(leaf.dtype) in FLOATS
        return own.to_numpy(leaf).astype(wide if floating else leaf.dtype)

    kernels = ReferenceBackend(Device("reference"), dtype=wide).kernels()
    results = getattr(DynamicOps(kernels), name)(*tree_map(fetch, args), **attrs)
    like = args[0] if CATALOG[name].rounds else None
    return tree_map(lambda leaf: own.from_numpy(leaf, like), results)
