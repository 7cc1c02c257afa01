"""Opens draft heads, and runs them beside the model that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from inl.backend.programs import compile_program, info_of
from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.hub.resolve import resolve_model
from inl.dtypes import wrap
from inl.errors import CheckpointError
from inl.executor.checkpoint_formats import open_checkpoint
from inl.executor.loaded import Loaded
from inl.executor.model_executor import ModelExecutor
from inl.executor.tracing import strict_state
from inl.models import eagle3, mtp
from inl.models.draft_module import DraftModule, Hidden
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
    from inl.config import EngineConfig
    from inl.executor.model_loader import LanguageModel
    from inl.ops.protocol import Ops
    from inl.runners.local_runner import LocalRunner
    from inl.spec.limits import Limits

MAPPINGS = ("d2t", "t2d")
"""Tensors that map the draft vocabulary to the target's, and back."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The files of a draft head, without weights."""

    module: DraftModule
    config: Any
    checkpoint: Checkpoint
    tokens: NDArray[np.int64]
    """[draft_vocab] token of the target for each token that the head predicts."""


def find_head(target: LanguageModel, config: EngineConfig) -> DraftHead | None:
    """Open the draft head of a config, if it has one; raises as :func:`open_head`."""
    if config.speculation == "mtp":
        return open_mtp(target)
    if config.speculation == "eagle" and config.draft_model is not None:
        return open_head(resolve_model(config.draft_model), target)
    return None


def open_mtp(target: LanguageModel) -> DraftHead:
    """Open the layer of the target's own files that predicts further tokens.

    Reads no weights. Raises :class:`~inl.errors.ModelError` if there is none.
    """
    checkpoint = target.files
    names, where = checkpoint.names(), f"{checkpoint.path}: layer of further tokens"
    layout = mtp.find_names(names, target.config.layers)
    if layout is None:
        raise CheckpointError(
            f"{where}: not found among {len(names)} tensors; accepted with "
            "speculation='mtp': a checkpoint with one"
        )
    config = mtp.config(target.model, target.config, layout)
    pieces = {
        name: Piece((stored,), checkpoint.spec(stored)[1])
        for name, stored in mtp.stored_names(layout, names).items()
    }
    own = AdaptedCheckpoint(checkpoint, pieces)
    stored = stored_specs(own)
    check_tensors(plan_weights(mtp.weights(config), (), stored), stored, where)
    tokens = np.arange(config.draft_vocab)
    return DraftHead(mtp.MODULE, config, own, tokens)


def open_head(path: str | Path, target: LanguageModel) -> DraftHead:
    """Open an EAGLE-3 head of ``target`` and check its config and tensors.

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
    return DraftHead(eagle3.MODULE, config, checkpoint, tokens)


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
        self._module = head.module
        self._drafts: dict[tuple[Bucket, bool], Any] = {}

    def draft(
        self, bucket: Bucket, frame: Any, rows: Any, source: Any, *, is_tapped: bool
    ) -> tuple[NDArray[np.int64], Any]:
        """Compute a step; see :class:`~inl.models.draft_module.DraftModule`.

        frame, rows: int32 arrays on the host. source: on the device. Returns tokens of
        the draft vocabulary [R] on the host, and hidden states [R, H] on the device.
        """
        hidden = Hidden(self.backend.tensor(wrap(rows)), source)
        program = self._program(bucket, is_tapped)
        message = self.backend.tensor(wrap(frame))
        tokens, out = self.call(program, self.loaded.weights, message, hidden)
        return self.backend.numpy(tokens).data.reshape(-1).astype(np.int64), out

    def _program(self, bucket: Bucket, is_tapped: bool) -> Any:
        program = self._drafts.get((bucket, is_tapped))
        if program is None:
            body = partial(
                self._module.draft, self.ops(bucket), self.loaded.config,
                is_tapped=is_tapped,
            )  # fmt: skip
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


@dataclass(frozen=True)
class LoadedHead(Loaded):
    """A draft head, whose steps come after those of its target and after its own."""

    module: DraftModule = eagle3.MODULE

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
        state = strict_state(self.module.state(config), limits)
        for is_tapped in (True, False):
            size = config.tapped if is_tapped else config.hidden_size
            hidden = Hidden(
                StrictArray((bucket.tokens,), "int32"),
                StrictArray((bucket.tokens, size), config.dtype),
            )
            *_, state = self.module.draft(
                ops, config, weights, message, hidden, state, is_tapped=is_tapped
            )
        words = admit_size(1, limits.max_blocks_per_seq)
        ops.admit(StrictArray((1, words), "int32"), state.tables)
        return tracer


def plan_head(head: DraftHead, target: Loaded) -> LoadedHead:
    """Return a head without weights; those that it shares have the target's plans."""
    module, config = head.module, head.config.in_dtype(target.config.dtype)
    selection, stored = target.selection, stored_specs(head.checkpoint)
    groups = plan_weights(
        module.weights(config), selection.kernels, stored, invariant=selection.invariant
    )
    groups = groups._replace(**_shared(module, config, target.groups))
    model = Model(_not_called, module.weights, module.state, *(_not_called,) * 3)
    return LoadedHead(model, config, groups, None, selection, module=module)


def _load(head: DraftHead, target: Loaded, backend: Backend) -> LoadedHead:
    """Load the weights of a head; those that it shares are the target's."""
    planned = plan_head(head, target)
    theirs = getattr(target.weights, "model", target.weights)  # of adapted weights
    shared = _shared(head.module, planned.config, theirs)
    own = planned.groups._replace(**dict.fromkeys(shared))
    weights = load_weights(own, head.checkpoint, backend, planned.config.dtype)
    return replace(planned, weights=weights._replace(**shared))


def _shared(module: DraftModule, config: Any, target: Any) -> dict[str, Any]:
    """Return what a head shares of the target's tree, by the head's names."""
    return {
        name: getattr(target, theirs) for name, theirs in module.shared(config).items()
    }


def _not_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("the programs of a draft head are its own")
