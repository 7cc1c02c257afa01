"""INL dynamics on torch, JAX and NumPy arrays; results are of the same framework.

Differentiable on torch and JAX. ``mu``, ``alpha``, ``beta`` and ``gate`` broadcast to
``x`` and may be Python numbers. Half types are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from inl.errors import MissingPackage, PluginError, RequestError
from inl.install_command import install_command
from inl_toolkit.functional.out_of_memory import translating

if TYPE_CHECKING:
    from inl.spec.functions import Functions

Pair = tuple[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])

AUTO = "auto"
"""Computes with the framework of the arrays."""

PACKAGES = {"torch": "inl-torch", "jax": "inl-jax"}
"""Distribution that provides the functions of each framework."""


class _Setting:
    """Process-wide setting of :func:`set_backend`."""

    backend = AUTO


WHOLE: list[Callable[..., Any]] = []
"""Functions of arrays that a compiler may put into its graph as one call."""


def whole(function: F) -> F:
    """Let torch's compiler trace a call by its tensors alone, without its Python code.

    Of code that it enters, it checks every function and module at each call of the
    program, which takes longer than a small step. The first argument is an array.
    """

    def leaf(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("x")
        module = type(first).__module__.partition(".")[0]
        is_own = _Setting.backend in (AUTO, _framework_name(module))
        if not is_own or not _is_imported(module):
            return function(*args, **kwargs)
        return leaf(*args, **kwargs)

    WHOLE.append(leaf)
    # functools.wraps keeps the signature, which mypy does not express as F.
    return call  # type: ignore[return-value]


def set_backend(name: str) -> None:
    """Set the framework that computes these functions, for the whole process.

    name: "auto", "numpy", "torch" or "jax". "auto" uses the framework of each call's
    arrays. Any other copies arrays to that framework and results back; torch tensors
    that require gradients then raise, since their gradients would be lost. It does not
    affect engines: :class:`~inl.EngineConfig` selects their device. Raises
    :class:`~inl.errors.RequestError` for an unknown name, and
    :class:`~inl.errors.MissingPackage` if a package has to be installed.
    """
    known = sorted({AUTO, *_frameworks().values()})
    if name not in known:
        raise RequestError(
            f"set_backend: found {name!r}, accepted: {', '.join(known)}; to choose a "
            "device, use EngineConfig(backend=...)"
        )
    if name != AUTO:
        functions_of(name)
    _Setting.backend = name


def get_backend(*arrays: Any) -> str:
    """Return what computes.

    ``get_backend(x)`` returns the framework that computes these functions for ``x``.
    ``get_backend()`` returns the setting of :func:`set_backend`; where that is "auto",
    the type of the device that was detected, such as "cuda" or "cpu", as
    ``EngineConfig(backend="auto")`` selects it.
    """
    if _Setting.backend != AUTO:
        return _Setting.backend
    if not arrays:
        from inl.plugin import choose_device

        return str(choose_device(AUTO).type)
    return _framework("get_backend", dict(enumerate(arrays)))


@whole
@translating
def inl_dynamics(
    x: Any, v: Any, mu: Any, alpha: Any, beta: Any, gate: Any, dt: Any = 0.1
) -> Pair:
    """Advance position ``x`` and velocity ``v`` [..., D] by one step toward ``mu``.

    ``v' = alpha * v - beta * (x - mu)``, ``x' = x + dt * gate * v'``. Returns x' and
    v'. dt: a number or a 0-dimensional array. Raises
    :class:`~inl.errors.RequestError` for operands that do not broadcast to ``x``, are
    not floating-point, or belong to different frameworks.
    """
    owner = _owner_of_alike(x, v, mu, alpha, beta, gate) if type(dt) is float else ""
    if owner and _Setting.backend == AUTO:
        return functions_of(owner).inl_dynamics(x, v, mu, alpha, beta, gate, dt=dt)
    from inl.ops.inl import check_operands

    operands = {
        "x": x, "v": v, "mu": mu, "alpha": alpha, "beta": beta, "gate": gate, "dt": dt
    }  # fmt: skip
    owner = _framework("inl_dynamics", operands)
    if _Setting.backend == AUTO:
        _alike[type(x), x.dtype] = owner
    shaped = {name: _Shaped(each) for name, each in operands.items()}
    shape = shaped.pop("x").shape
    check_operands("inl_dynamics", (), dt=shaped.pop("dt"))
    check_operands("inl_dynamics", shape, **shaped)
    return _call(owner, "inl_dynamics", operands)


@whole
@translating
def inl_dynamics_step(
    x: Any,
    v: Any,
    mu: Any,
    controller_output: Any,
    dt: Any = 0.1,
    *,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    """Advance by one step with the output of a controller, [..., 3 * D].

    Its thirds are alpha, beta and gate before sigmoid, softplus and sigmoid. most_beta:
    maximum of beta. limit: maximum magnitude of velocities. Returns and raises as
    :func:`inl_dynamics`.
    """
    return _controlled(
        "inl_dynamics_step",
        {"x": x, "v": v, "mu": mu, "controller": controller_output, "dt": dt},
        most_beta=most_beta,
        limit=limit,
    )


@translating
def inl_dynamics_n_steps(
    x: Any,
    v: Any,
    mu: Any,
    controller: Any,
    n_steps: int,
    dt: Any = 0.1,
    *,
    most_beta: float | None = None,
    limit: float | None = None,
) -> Pair:
    """Advance by ``n_steps`` steps.

    controller: an output [..., 3 * D] used in all steps, or a function ``(x, v)`` that
    computes the output of each step. Otherwise as :func:`inl_dynamics_step`.
    """
    if type(n_steps) is not int or n_steps < 0:
        raise RequestError(
            f"inl_dynamics_n_steps: n_steps: found {n_steps!r}, accepted: 0 or more"
        )
    clamps: dict[str, Any] = {"most_beta": most_beta, "limit": limit}
    if callable(controller):
        step: Callable[[Any, Any], Any] = controller
        for _ in range(n_steps):
            x, v = inl_dynamics_step(x, v, mu, step(x, v), dt, **clamps)
        return x, v
    return _fixed_steps(x, v, mu, controller, n_steps, dt, **clamps)


@whole
@translating
def _fixed_steps(
    x: Any, v: Any, mu: Any, controller: Any, n_steps: int, dt: Any, **clamps: Any
) -> Pair:
    operands = {"x": x, "v": v, "mu": mu, "controller": controller, "dt": dt}
    return _controlled("inl_dynamics_n_steps", operands, n_steps=n_steps, **clamps)


_alike: dict[Any, str] = {}
"""Frameworks by type and dtype of arrays that were accepted."""


def _owner_of_alike(x: Any, *others: Any) -> str:
    """Return the framework of arrays of one type, dtype and shape, else "".

    Checks of others take longer than the step of a small array.
    """
    kind, dtype = type(x), getattr(x, "dtype", None)
    owner = _alike.get((kind, dtype), "")
    if not owner:
        return ""
    shape = x.shape
    for each in others:
        if type(each) is not kind or each.dtype != dtype or each.shape != shape:
            return ""
    return owner


class _Shaped:
    """Shape of an array, or () of a number."""

    def __init__(self, value: Any) -> None:
        self.shape = tuple(getattr(value, "shape", ()))


def _controlled(name: str, operands: dict[str, Any], **attrs: Any) -> Pair:
    from inl.ops.inl import check_controller, check_operands

    owner = _framework(name, operands)
    shaped = {key: _Shaped(each) for key, each in operands.items()}
    check_operands(name, (), dt=shaped["dt"])
    check_operands(name, shaped["x"].shape, v=shaped["v"], mu=shaped["mu"])
    check_controller(name, shaped["x"].shape, shaped["controller"])
    return _call(owner, name, operands, **attrs)


def _call(owner: str, name: str, operands: dict[str, Any], **attrs: Any) -> Pair:
    """Compute with the arrays' framework, or with that of :func:`set_backend`."""
    chosen = owner if _Setting.backend == AUTO else _Setting.backend
    own, other = functions_of(owner), functions_of(chosen)
    if own is other:
        return _run(own, name, operands, attrs)
    moved = {
        key: each if _is_number(each) else other.from_numpy(own.to_numpy(each), None)
        for key, each in operands.items()
    }
    results = _run(other, name, moved, attrs)
    kinds = operands["x"], operands["v"]
    examples = [operands["x"] if _is_number(each) else each for each in kinds]
    x, v = (
        own.from_numpy(other.to_numpy(result), example)
        for result, example in zip(results, examples, strict=True)
    )
    return x, v


def _run(
    functions: Functions, name: str, operands: Mapping[str, Any], attrs: dict[str, Any]
) -> Pair:
    *tensors, dt = operands.values()
    run: Callable[..., Pair] = getattr(functions, name)
    return run(*tensors, dt=dt, **attrs)


def discovery(function: F) -> F:
    """Mark a function of constants whose result ``torch.compile`` takes as constant.

    The compiler calls it once while it traces, and does not trace the search for
    plugins. The attribute is what ``torch.compiler.assume_constant_result`` sets.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_names: dict[str, str] = {}
"""Frameworks by modules of arrays, those that were looked up."""


@discovery
def _framework_name(module: str) -> str:
    """Return the framework of a top-level module of arrays, "" if there is none."""
    if module not in _names:
        name = _frameworks().get(module, "")
        if not name:
            return ""
        _names[module] = name
    return _names[module]


@discovery
def _is_imported(module: str) -> bool:
    """Import the functions of a module of arrays; ``False`` if there are none."""
    framework = _framework_name(module)
    if not framework:
        return False
    mark = functions_of(framework).mark_whole
    if mark is not None:
        mark(WHOLE)
    return True


def _frameworks() -> Mapping[str, str]:
    from inl.plugin import registry

    return registry().frameworks()


def _framework(where: str, operands: Mapping[Any, Any]) -> str:
    """Return the framework of the arrays; raises if there are several."""
    owners: dict[str, Any] = {}
    seen: set[Any] = set()
    for name, each in operands.items():
        kind = type(each), getattr(each, "dtype", None)
        if kind not in seen and (name == "x" or not _is_number(each)):
            seen.add(kind)
            owners.setdefault(_owner(where, name, each), name)
    if len(owners) > 1:
        listed = ", ".join(f"{name} of {owner}" for owner, name in owners.items())
        raise RequestError(
            f"{where}: found {listed}; accepted: arrays of one framework, and numbers"
        )
    return next(iter(owners))


def _is_number(value: Any) -> bool:
    """Whether it is a number, or one that torch's compiler has not fixed."""
    if hasattr(value, "dtype"):
        return isinstance(value, Real)
    return isinstance(value, Real) or hasattr(value, "__float__")


def _owner(where: str, name: Any, value: Any) -> str:
    framework = framework_of(where, name, value)
    _check_floating(where, name, value)
    return framework


def framework_of(where: str, name: Any, value: Any) -> str:
    """Return the framework of an array; raises :class:`RequestError` for others."""
    for kind in type(value).__mro__:
        framework = _framework_name(kind.__module__.partition(".")[0])
        if framework:
            return framework
    accepted = ", ".join(sorted(set(_frameworks().values())))
    raise RequestError(
        f"{where}: {name}: found {type(value).__name__}, accepted: an array of "
        f"{accepted}{'' if name == 'x' else ', or a number'}"
    )


def _check_floating(where: str, name: Any, value: Any) -> None:
    kind = str(value.dtype).rpartition(".")[2]
    if "float" not in kind:
        raise RequestError(
            f"{where}: {name}: found {kind}, accepted: floating-point numbers"
        )


def functions_of(framework: str) -> Functions:
    """Return a framework's functions; raises :class:`MissingPackage`."""
    _import_functions(framework)
    return _functions[framework]


_functions: dict[str, Functions] = {}
"""Imported functions by framework; filled by :func:`_import_functions`."""


@discovery
def _import_functions(framework: str) -> bool:
    if framework in _functions:
        return True
    from inl.plugin import registry

    try:
        _functions[framework] = registry().functions(framework)
    except PluginError as error:
        if isinstance(error.__cause__, ImportError) and framework in PACKAGES:
            raise MissingPackage(
                f"arrays of {framework}: {install_command(PACKAGES[framework])}"
            ) from error
        raise
    return True
