"""The interface of a grammar that constrains the output of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from inl.spec.message import IntArray


class Guide(Protocol):
    """The state of a grammar after the collected output of one request.

    The state depends on the tokens only, so that a request gives the same output alone
    or in a batch, and with or without drafts. Not thread-safe; every method raises
    :class:`~inl.errors.RequestError` if the grammar becomes too complex to follow.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    @property
    def forced(self) -> Sequence[int]:
        """The tokens that must come next because the grammar allows one text only."""

    def advance(self, token: int) -> None:
        """Append a token that :meth:`masks` allows."""

    def masks(self, drafts: Sequence[int] = ()) -> IntArray:
        """Return int32 [n, ceil(V / 32)]: the tokens allowed next, and after drafts.

        drafts: tokens that a verify step computes after the collected ones. Row i is
        the mask after the first i of them; rows end with the first draft that the
        grammar does not allow, so that ``1 <= n <= len(drafts) + 1``. A forced token is
        the only one allowed. The state does not change.
        """

    def accepts(self, drafts: Sequence[int]) -> int:
        """Return how many leading ``drafts`` may follow, end tokens excluded.

        Costs less than :meth:`masks`. The state does not change.
        """

    def restart(self) -> None:
        """Return to the state before the first token."""

    def copy(self) -> Guide:
        """Return another guide, in the state before the first token."""


def restore(guide: Guide, output_ids: Sequence[int]) -> None:
    """Set a guide to its state after ``output_ids``, whatever it was before."""
    guide.restart()
    for token in output_ids:
        guide.advance(token)
