"""Drafters of plugins: what they are made for, and what keeps a broken one harmless."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inl.errors import InlError, PluginError, RequestError
from inl.plugin import registry
from inl.plugin.contribution import describe
from inl.speculation.drafters import Drafter, DraftQuery, RatedDrafter

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

log = logging.getLogger("inl")


@dataclass(frozen=True, kw_only=True)
class DraftTarget:
    """The model whose tokens a drafter predicts. Later versions may add fields."""

    path: Path
    """File or folder of the model."""
    vocab: int
    """Token ids are 0 .. vocab - 1."""
    tokenizer: Tokenizer | None
    """``None`` if the model has none."""
    context: int
    """Most tokens of a sequence."""
    sequences: int
    """Most sequences that run at the same time."""
    max_drafts: int
    """Most drafted tokens of a sequence and step."""
    draft_model: str | Path | None
    """As in :class:`~inl.config.EngineConfig`."""


def make_plugin_drafter(name: str, target: DraftTarget) -> Drafter:
    """Return the drafter that a plugin registers as ``name``.

    Raises :class:`~inl.errors.RequestError` if it cannot be made.
    """
    where = f"EngineConfig.speculation: found {name!r}, but"
    try:
        origin, factory = registry().function("drafter", name)
    except PluginError as error:
        raise RequestError(f"{where} {error}") from error
    try:
        drafter = factory(target)
    except (InlError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise RequestError(f"{where} {origin} failed: {describe(error)}") from error
    absent = [
        each
        for each in ("propose", "forget", "close")
        if not callable(getattr(drafter, each, None))
    ]
    if absent:
        raise RequestError(
            f"{where} {origin} returned {type(drafter).__name__} without "
            f"{', '.join(absent)}; accepted: a Drafter"
        )
    kind = GuardedRates if isinstance(drafter, RatedDrafter) else GuardedDrafter
    return kind(drafter, f"{origin}: drafter {name}", target.vocab)


class GuardedDrafter:
    """A plugin's drafter, not asked again once it raises or returns no tokens.

    Predictions change no output, so its requests go on without them.
    """

    def __init__(self, inner: Drafter, where: str, vocab: int) -> None:
        self._inner = inner
        self._where = where
        self._vocab = vocab
        self._failed = False

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        if not self._failed:
            try:
                return self._checked(queries, self._inner.propose(queries))
            except Exception as error:
                self._fail(error)
        return [()] * len(queries)

    def _checked(
        self, queries: Sequence[DraftQuery], proposals: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        if len(proposals) != len(queries):
            raise PluginError(
                f"propose: found {len(proposals)} proposals for {len(queries)} queries"
            )
        checked = [
            list(each)[: query.limit]
            for query, each in zip(queries, proposals, strict=True)
        ]
        for token in (token for each in checked for token in each):
            if type(token) is not int or not 0 <= token < self._vocab:
                raise PluginError(
                    f"propose: found the token {token!r:.40}, accepted: whole numbers "
                    f"from 0 to {self._vocab - 1}"
                )
        return checked

    def _fail(self, error: Exception) -> None:
        self._failed = True
        log.warning(
            "%s: not asked again, sequences go on without drafts: %s",
            self._where,
            describe(error),
        )

    def forget(self, request: int) -> None:
        if not self._failed:
            try:
                self._inner.forget(request)
            except Exception as error:
                self._fail(error)

    def close(self) -> None:
        try:
            self._inner.close()
        except Exception as error:
            log.warning("%s: close: %s", self._where, describe(error))


class GuardedRates(GuardedDrafter):
    """A plugin's drafter that knows how good its predictions are."""

    _inner: RatedDrafter

    def rate(self, request: int) -> float:
        try:
            rate = 0.0 if self._failed else float(self._inner.rate(request))
            if not 0.0 <= rate <= 1.0:
                raise PluginError(f"rate: found {rate!r}, accepted: 0 to 1")
        except Exception as error:
            self._fail(error)
            rate = 0.0
        return rate
