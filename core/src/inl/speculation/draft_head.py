"""Opens EAGLE-3 draft heads, and runs them beside the model that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from inl.backend.programs import compile_program, info_of
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import wrap
from inl.errors import CheckpointError
from inl.executor.checkpoint_formats import open_checkpoint
from inl.executor.loaded import Loaded
from inl.executor.model_executor import ModelExecutor
from inl.executor.tracing import strict_state
from inl.models import eagle3
from inl.models.fields import Fields
from inl.spec.dispatch import Choices, Tracer
from inl.spec.message import admit_size, layout
from inl.spec.model import Model
from inl.spec.step import Bucket
from inl.spec.strict_array import StrictArray
from inl.spec.tree import tree_map
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import check_tensors, plan_weights

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from inl.backend.base import Backend
    from inl.executor.model_loader import LanguageModel
    from inl.ops.protocol import Ops
    from inl.runners.local_runner import LocalRunner
    from inl.spec.limits import Limits

MAPPINGS = ("d2t", "t2d")
"""Tensors that map the draft vocabulary to the target's, and back."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The files of a draft head, without weights."""

    config: eagle3.EagleConfig
    checkpoint: Checkpoint
    tokens: NDArray[np.int64]
    """[draft_vocab] token of the target for each token that the head predicts."""


def open_head(path: str | Path, target: LanguageModel) -> DraftHead:
    """Open a draft head of ``target`` and check its config and tensors.

    Reads no weights but the vocabulary. Raises :class:`~inl.errors.ModelError`.
    """
    checkpoint = open_checkpoint(path)
    names, where = checkpoint.names(), checkpoint.path
    if "fc.weight" not in names:
        raise CheckpointError(
            f"{where}: tensor 'fc.weight': not found among {len(names)}; accepted: the "
            "folder of an EAGLE-3 draft head"
        )
    try:
        config = _config(checkpoint, names, target)
        tokens = _tokens(checkpoint, names, config)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    stored = stored_specs(checkpoint)
    for name in MAPPINGS:
        stored.pop(name, None)
    check_tensors(plan_weights(eagle3.weights(config), (), stored), stored, str(where))
    return DraftHead(config, checkpoint, tokens)


def _config(
    checkpoint: Checkpoint, names: list[str], target: LanguageModel
) -> eagle3.EagleConfig:
    """Read the config and compare its sizes with the target's."""
    sizes = target.config
    config = eagle3.config(
        Fields(checkpoint.config), names, layers=sizes.layers, hidden=sizes.hidden_size
    )
    for name in ("hidden_size", "vocab_size"):
        found, accepted = getattr(config, name), getattr(sizes, name)
        if found != accepted:
            raise CheckpointError(
                f"config field {name!r}: found {found}, accepted: {accepted}, that of "
                f"{target.name}"
            )
    _, shape = checkpoint.spec("fc.weight")
    if shape[-1] != config.tapped:
        raise CheckpointError(
            f"tensor 'fc.weight': found {shape[-1]} columns, accepted: "
            f"{config.tapped}, for {len(config.taps)} layers of {sizes.hidden_size} "
            f"({eagle3.TAP_FIELD}: {list(config.taps)})"
        )
    if not config.own_head and config.draft_vocab != config.vocab_size:
        raise CheckpointError(
            f"config field 'draft_vocab_size': found {config.draft_vocab} without "
            f"lm_head.weight, accepted: {config.vocab_size}, with the target's head"
        )
    return config


def _tokens(
    checkpoint: Checkpoint, names: list[str], config: eagle3.EagleConfig
) -> NDArray[np.int64]:
    """Return the token of the target for each token of the draft vocabulary."""
    ids = np.arange(config.draft_vocab)
    if "d2t" not in names:
        if config.draft_vocab != config.vocab_size:
            raise CheckpointError(
                "tensor 'd2t': not found, needed for a draft vocabulary of "
                f"{config.draft_vocab} of {config.vocab_size} tokens"
            )
        return ids
    offsets = checkpoint.tensor("d2t").data
    if offsets.shape != ids.shape or offsets.dtype.kind != "i":
        raise CheckpointError(
            f"tensor 'd2t': found {offsets.dtype} {list(offsets.shape)}, accepted: "
            f"integers [{config.draft_vocab}]"
        )
    tokens: NDArray[np.int64] = ids + offsets
    wrong = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    if wrong.size:
        raise CheckpointError(
            f"tensor 'd2t': found token {wrong[0]}, accepted: 0 to "
            f"{config.vocab_size - 1}"
        )
    return tokens


class DraftExecutor(ModelExecutor):
    """Runs a draft head on the backend of its target, with a cache of its own.

    Blocks have the same numbers as those of the target's cache group ``group``, so that
    both share prefixes; ``scratch`` more ones per slot hold drafted tokens.
    """

    def __init__(
        self, head: DraftHead, target: LocalRunner, *, group: int, scratch: int
    ) -> None:
        backend = target.executor.backend
        limits = head_limits(head, backend, target.limits, group=group, scratch=scratch)
        super().__init__(backend, _load(head, target.loaded, backend), limits)
        self._drafts: dict[tuple[Bucket, bool], Any] = {}

    def draft(
        self, bucket: Bucket, frame: Any, rows: Any, source: Any, *, is_tapped: bool
    ) -> tuple[NDArray[np.int64], Any]:
        """Compute a step; see :func:`inl.models.eagle3.draft`.

        frame, rows: int32 arrays on the host. source: on the device. Returns tokens of
        the draft vocabulary [R] on the host, and hidden states [R, H] on the device.
        """
        hidden = eagle3.Hidden(self.backend.tensor(wrap(rows)), source)
        program = self._program(bucket, is_tapped)
        message = self.backend.tensor(wrap(frame))
        tokens, out = self.call(program, self.loaded.weights, message, hidden)
        return self.backend.numpy(tokens).data.reshape(-1).astype(np.int64), out

    def _program(self, bucket: Bucket, is_tapped: bool) -> Any:
        program = self._drafts.get((bucket, is_tapped))
        if program is None:
            body = partial(
                eagle3.draft, self.ops(bucket), self.loaded.config, is_tapped=is_tapped
            )
            program = compile_program(
                self.backend, body, info_of("draft", None, self.limits)
            )
            self._drafts[bucket, is_tapped] = program
        return program


def head_limits(
    head: DraftHead, backend: Backend, limits: Limits, *, group: int, scratch: int
) -> Limits:
    """Return the limits of a head's programs beside those of its target."""
    limits = replace(
        limits,
        blocks=(limits.blocks[group] + scratch * limits.slots,),
        windows=(), vocab=head.config.draft_vocab, sampler="greedy", buckets=(),
        max_blocks_per_seq=limits.max_blocks_per_seq + scratch,
        max_drafts=0, adapters=0, adapter_rank=0, embedding=0, decode_steps=1,
    )  # fmt: skip
    return replace(limits, buckets=tuple(backend.buckets(limits)))


class LoadedHead(Loaded):
    """A draft head, whose steps come after those of its target and after its own."""

    def tracer(
        self,
        bucket: Bucket,
        limits: Limits,
        *,
        table_width: int | None = None,
        choices: Choices | None = None,
        is_scored: bool = False,
    ) -> Tracer:
        assert table_width is None, "a draft head reads whole tables"
        assert not is_scored, "a draft head scores no prompts"
        config = self.config
        tracer = Tracer(self.selection, bucket, limits.block_size, choices or {})
        ops = cast("Ops", tracer)
        weights = tree_map(lambda plan: plan.specs(config.dtype), self.groups)
        words = layout(bucket, groups=1, block_size=limits.block_size).size
        message = StrictArray((words,), "int32")
        state = strict_state(eagle3.state(config), limits)
        for is_tapped in (True, False):
            size = config.tapped if is_tapped else config.hidden_size
            hidden = eagle3.Hidden(
                StrictArray((bucket.tokens,), "int32"),
                StrictArray((bucket.tokens, size), config.dtype),
            )
            *_, state = eagle3.draft(
                ops, config, weights, message, hidden, state, is_tapped=is_tapped
            )
        words = admit_size(1, limits.max_blocks_per_seq)
        ops.admit(StrictArray((1, words), "int32"), state.tables)
        return tracer


def plan_head(head: DraftHead, target: Loaded) -> LoadedHead:
    """Return a head without weights; those that it shares have the target's plans."""
    config = replace(head.config, dtype=target.config.dtype)
    selection, stored = target.selection, stored_specs(head.checkpoint)
    groups = plan_weights(
        eagle3.weights(config), selection.kernels, stored, invariant=selection.invariant
    )
    shared = {name: getattr(target.groups, name) for name in _shared(config)}
    groups = groups._replace(**shared)
    return LoadedHead(_MODEL, config, groups, None, selection)


def _load(head: DraftHead, target: Loaded, backend: Backend) -> LoadedHead:
    """Load the weights of a head; those that it shares are the target's."""
    planned = plan_head(head, target)
    shared = _shared(planned.config)
    own = planned.groups._replace(**dict.fromkeys(shared))
    weights = load_weights(own, head.checkpoint, backend, planned.config.dtype)
    theirs = getattr(target.weights, "model", target.weights)  # of adapted weights
    weights = weights._replace(**{name: getattr(theirs, name) for name in shared})
    return replace(planned, weights=weights)


def _shared(config: eagle3.EagleConfig) -> list[str]:
    """Return the weight groups that a head shares with its target."""
    own = {"embed": config.own_table, "head": config.own_head}
    return [name for name, is_own in own.items() if not is_own]


def _not_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("the programs of a draft head are its own")


_MODEL = Model(
    _not_called, eagle3.weights, eagle3.state, _not_called, _not_called, _not_called
)
