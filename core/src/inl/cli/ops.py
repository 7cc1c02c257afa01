"""``inl ops``: the op catalog and the kernels that backends provide."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inl.cli.table import print_table
from inl.device import Device
from inl.errors import InlError, RequestError
from inl.plugin import choose_device, make_backend, registry

if TYPE_CHECKING:
    from inl.spec.op import OpSpec

Labels = dict[str, list[str]]


def run(
    op: Annotated[
        str | None, typer.Argument(help="Describe one op; lists all ops if omitted.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Show kernels of this device. [default: all available devices]"
        ),
    ] = None,
    body: Annotated[
        bool, typer.Option("--body", help="Print the body of OP, its specification.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List ops, their signatures and the kernels of backends."""
    specs = _specs(op)
    if body:
        if op is None or as_json:
            raise RequestError("--body: needs one op and no --json: inl ops OP --body")
        source = inspect.getsource(specs[0].body)
        print(source[source.index("def ") :], end="")  # without its decorator
        return
    kernels, problems = _kernels(device)
    rows = [_row(spec, kernels) for spec in specs]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
    elif op is not None:
        print(_page(specs[0], rows[0]))
    else:
        cells = [
            (row["op"], row["kind"], row["signature"], _named(row["kernels"]))
            for row in rows
        ]
        print_table(("op", "kind", "signature", "kernels"), cells)
    for problem in problems:
        typer.echo(f"inl: {problem}", err=True)


def _specs(name: str | None) -> list[OpSpec]:
    import inl.ops
    from inl.spec.op import CATALOG

    assert inl.ops, "importing it fills the catalog"
    if name is not None and name not in CATALOG:
        raise RequestError(inl.ops.unknown_op(name))
    return [CATALOG[name]] if name else [CATALOG[each] for each in sorted(CATALOG)]


def _kernels(wanted: str | None) -> tuple[dict[str, Labels], list[str]]:
    """Return op -> device type -> kernel names, and errors of unavailable backends.

    Raises :class:`InlError` if the requested device is unavailable.
    """
    if wanted is not None:
        return _collect([choose_device(wanted)], strict=True)
    known = registry()
    there = [
        Device(kind, min(info.index for info in probed.devices))
        for kind in known.types
        if (probed := known.find(kind)).devices
    ]
    return _collect(there, strict=False)


def _collect(
    devices: list[Device], *, strict: bool
) -> tuple[dict[str, Labels], list[str]]:
    kernels_by_op: dict[str, Labels] = {}
    problems: list[str] = []
    for device in devices:
        try:
            backend = make_backend(device)
            kernels = [*backend.kernels(), *registry().kernels(device.type)]
        except InlError as error:
            if strict:
                raise
            problems.append(str(error))
            continue
        for kernel in kernels:
            labels = kernels_by_op.setdefault(kernel.op, {}).setdefault(
                str(device.type), []
            )
            labels.append(kernel.name)
    return kernels_by_op, problems


def _row(spec: OpSpec, kernels: dict[str, Labels]) -> dict[str, Any]:
    return {
        "op": spec.name,
        "kind": "composite" if spec.composite else "primitive",
        "signature": signature(spec),
        "kernels": kernels.get(spec.name, {}),
    }


def signature(spec: OpSpec) -> str:
    """Return the signature as a caller writes it: ``(x, w, *, eps)``."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(spec.body).parameters.values()
    ]
    shown = parameters[1:] if spec.composite else parameters
    return str(inspect.Signature(shown))


def _named(kernels: Labels) -> str:
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kernels.items())


def _page(spec: OpSpec, row: dict[str, Any]) -> str:
    fields = getattr(spec.weights, "_fields", ())
    kind = "composite, written over other ops" if spec.composite else "primitive"
    lines = [
        f"{spec.name}{row['signature']}",
        "",
        inspect.getdoc(spec.body) or "",
        "",
        f"kind       {kind}",
        f"weights    {', '.join(fields) or 'none'}",
        f"consumes   {', '.join(spec.consumes) or 'nothing'}",
        f"tolerance  {spec.tolerance:g} x the rounding error of the reference body",
        f"kernels    {_named(row['kernels']) or 'none'}",
    ]
    return "\n".join(lines)
