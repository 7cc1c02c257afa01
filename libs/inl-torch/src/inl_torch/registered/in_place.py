"""INL dynamics and their gradients with few temporary tensors, for any device.

Not traceable by autograd: intermediate tensors are overwritten. Its equations are in
:mod:`inl.ops.inl_functions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from inl_torch.eager.inl import upcast
from inl_torch.registered.formula import Pair, activated


class Operands(NamedTuple):
    """Operands in float32 or wider; all but ``x`` broadcast to it."""

    x: torch.Tensor
    v: torch.Tensor
    mu: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor
    dt: torch.Tensor

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        v: torch.Tensor,
        mu: torch.Tensor,
        coefs: list[torch.Tensor],
        dt: torch.Tensor,
        most_beta: float | None,
    ) -> Operands:
        """Activate and widen the operands of the op ``inl::dynamics``."""
        wide_v = upcast(v).expand(x.shape)
        return cls(
            upcast(x), wide_v, upcast(mu), *activated(coefs, most_beta), upcast(dt)
        )


def velocity_after(x: torch.Tensor, v: torch.Tensor, o: Operands) -> torch.Tensor:
    """Return the next velocity before clamping, as a new tensor."""
    return (o.mu - x).mul_(o.beta).addcmul_(o.alpha, v)


def states(o: Operands, n_steps: int, limit: float | None) -> Iterator[Pair]:
    """Yield the state before each step, then the last one."""
    x, v, slope = o.x, o.v, o.gate * o.dt
    yield x, v
    for _ in range(n_steps):
        v = velocity_after(x, v, o)
        if limit is not None:
            v.clamp_(-limit, limit)
        x = torch.addcmul(x, slope, v)
        yield x, v


def gradients(
    gx: torch.Tensor,
    gv: torch.Tensor,
    o: Operands,
    n_steps: int,
    limit: float | None,
    needed: list[bool],
) -> list[torch.Tensor | None]:
    """Return gradients of the fields of ``o``, summed over axes of size 1 in them.

    needed: which fields to compute; the others are ``None``.
    """
    sums = _Sums(o, needed)
    slope = o.gate * o.dt
    before = list(states(o, n_steps - 1, limit)) if n_steps else []
    for x, v in reversed(before):
        s = torch.addcmul(gv, slope, gx)
        if limit is not None or sums.needs("gate", "dt"):
            new_v = velocity_after(x, v, o)
            if limit is not None:
                s.mul_(new_v.abs() <= limit)
                new_v.clamp_(-limit, limit)
            displacement = new_v.mul_(gx)
            sums.add("dt", o.gate, displacement)
            sums.add("gate", o.dt, displacement)
        sums.add("alpha", s, v)
        if sums.needs("beta"):
            sums.add("beta", s, o.mu - x)
        gv, pull = o.alpha * s, s.mul_(o.beta)
        sums.add("mu", None, pull)
        gx = gx - pull
    sums.add("x", None, gx if n_steps else gx.clone())
    sums.add("v", None, gv if n_steps else gv.clone())
    return sums.results()


class _Sums:
    """Sums of gradients over steps and over the axes that broadcasting added."""

    def __init__(self, operands: Operands, needed: list[bool]) -> None:
        self._operands = operands
        self._needed = dict(zip(Operands._fields, needed, strict=True))
        self._found: dict[str, torch.Tensor] = {}

    def needs(self, *names: str) -> bool:
        """Whether one of these gradients is computed."""
        return any(self._needed[name] for name in names)

    def add(self, name: str, factor: torch.Tensor | None, term: torch.Tensor) -> None:
        """Add ``factor * term``; does nothing for a gradient that is not needed."""
        if not self._needed[name]:
            return
        term = term if factor is None else factor * term
        term = term.sum_to_size(getattr(self._operands, name).shape)
        held = self._found.get(name)
        self._found[name] = term if held is None else held.add_(term)

    def results(self) -> list[torch.Tensor | None]:
        """Return one gradient per field; zeros where nothing was added."""
        for name, operand in zip(Operands._fields, self._operands, strict=True):
            if self._needed[name] and name not in self._found:
                self._found[name] = torch.zeros_like(operand)
        return [self._found.get(name) for name in Operands._fields]


def controller_gradient(
    thirds: list[torch.Tensor],
    o: Operands,
    controller: torch.Tensor,
    most_beta: float | None,
) -> torch.Tensor:
    """Return the gradient of a controller's output from those of its activated thirds.

    Overwrites ``thirds`` and the coefficients in ``o``.
    """
    for third, share in ((thirds[0], o.alpha), (thirds[2], o.gate)):
        third.mul_(share).mul_(share.neg_().add_(1))
    raw = upcast(controller).chunk(3, -1)[1]
    slope = raw.sigmoid()
    if most_beta is not None:
        slope.mul_(raw <= _inverse_softplus(most_beta))
    thirds[1].mul_(slope)
    return torch.cat(thirds, -1)


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value)) if value > 0 else -math.inf
