"""Sets up the speculation of an engine: the drafter and the times of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.errors import InlError, RequestError, TokenizerNotFound
from inl.executor.cache_sizing import draft_blocks
from inl.executor.model_loader import (
    LanguageModel,
    is_recurrent,
    is_replayed,
    open_model,
    verifies_drafts,
)
from inl.models import mtp
from inl.plugin import make_backend
from inl.plugin.contribution import AUTOMATIC, OWN_DRAFTERS
from inl.runners.local_runner import LocalRunner
from inl.runners.startup import start
from inl.scheduling.buckets import Buckets
from inl.scheduling.plan import SchedulerConfig
from inl.speculation.draft_head import DraftExecutor, find_head, open_mtp
from inl.speculation.drafters import Drafter, NgramDrafter
from inl.speculation.eagle_drafter import EagleDrafter
from inl.speculation.model_drafter import ModelDrafter
from inl.speculation.planner import Speculation
from inl.speculation.plugin_drafter import DraftTarget, make_plugin_drafter
from inl.speculation.step_times import measure_step_times, measure_token_seconds
from inl.workers.address import parse_worker

log = logging.getLogger("inl")

FEW_DRAFTS = 7
"""Most drafts of a row of the layer that "auto" takes, of which the times choose."""

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.protocol.runner import Limits, Runner
    from inl.speculation.draft_head import DraftHead
    from inl.text.tokenizer import Tokenizer

    NewCore = Callable[[Runner, SchedulerConfig], EngineCore]


def check_speculation(language: LanguageModel, config: EngineConfig) -> None:
    """Raise :class:`~inl.errors.RequestError` for a model that cannot verify drafts."""
    if verifies_drafts(language):
        return
    instead = "" if is_recurrent(language) else ', or velocity="reset"'
    raise RequestError(
        f"EngineConfig.speculation: found {config.speculation!r}, but the state of "
        f"{language.name} cannot go back to before a rejected token; accepted: "
        f"None{instead}"
    )


def choose_speculation(language: LanguageModel, config: EngineConfig) -> EngineConfig:
    """Return the config of an engine with "auto" replaced by "mtp" or ``None``.

    "mtp" where a checkpoint has the layer and one device of this process, whose steps
    are not repeated, computes the model; whether it pays is measured later.
    """
    if config.speculation != AUTOMATIC:
        return config
    without = replace(config, speculation=None)
    if not (
        config.use_kv_cache
        and config.adaptive_drafts
        and config.mesh is None
        and config.division.count == 1
        and (config.decode_steps or 1) == 1
        and parse_worker(config.backend) is None
        and config.on_worker_loss == "raise"  # another runner has no head
        and find_default_head(language) is not None
        and make_backend(config.backend).traits.decode_steps == 1
    ):
        return without
    drafts = config.max_drafts or FEW_DRAFTS
    return replace(config, speculation="mtp", max_drafts=drafts)


def find_default_head(language: LanguageModel) -> DraftHead | None:
    """Open the layer of a checkpoint that predicts further tokens, if it has one.

    One that does not fit is logged; so is that the model cannot verify its drafts.
    """
    if language.encoder is not None:
        return None
    if mtp.find_names(language.files.names(), language.config.layers) is None:
        return None
    try:
        check_speculation(language, EngineConfig(speculation="mtp"))
        return open_mtp(language)
    except InlError as error:
        log.info("%s: runs without speculation: %s", language.name, error)
        return None


def with_draft_head(language: LanguageModel, config: EngineConfig) -> LanguageModel:
    """Return the model with the taps of the draft head of ``config``, if it has one.

    Raises :class:`~inl.errors.ModelError` for files that have no head of this model.
    """
    head = find_head(language, config)
    if head is None:
        return language
    return replace(language, taps=head.config.taps, head=head)


def make_speculation(
    language: LanguageModel,
    config: EngineConfig,
    runner: Runner,
    scheduling: SchedulerConfig,
    drafter: Drafter | None = None,
    *,
    new_core: NewCore,
) -> Speculation:
    """Return the speculation of ``config``.

    drafter: used instead of the one that ``config.speculation`` names. new_core: makes
    the engine core on which a draft model generates. Raises
    :class:`~inl.errors.RequestError` if it names none, if the runner has no programs
    that verify drafts, or if the draft model has another tokenizer.
    """
    if config.speculation is None:
        raise RequestError(
            "drafter: found one with EngineConfig.speculation=None; set it to "
            '"ngram", whose drafter it replaces'
        )
    recurrent = is_recurrent(language)
    if recurrent and not (isinstance(runner, LocalRunner) and runner.loaded.ranks == 1):
        raise RequestError(
            f"EngineConfig.speculation: found {config.speculation!r} for "
            f"{language.name}, whose recurrent state goes back in one process only; "
            "accepted: a device of this process, or None"
        )
    count = config.draft_limit
    slots = runner.limits.slots
    rows = min(config.max_batch or slots, slots - 1)
    buckets = Buckets(
        runner.limits, token_budget=scheduling.token_budget, max_rows=rows
    )
    if not buckets.can_verify(count + 1):
        raise RequestError(
            f"EngineConfig.speculation: found {config.speculation!r}, but the backend "
            f"has no programs for {rows} rows of {count + 1} tokens; accepted: None"
        )
    times = None
    if config.adaptive_drafts:
        read_taps = None
        if isinstance(runner, LocalRunner) and runner.loaded.taps:
            read_taps = runner.read_taps
        times = measure_step_times(runner, rows, width=count + 1, read_taps=read_taps)
    drafter = drafter or _drafter(language, config, runner, scheduling, new_core)
    if config.adaptive_drafts and isinstance(drafter, EagleDrafter):
        drafter.measure(rows)
    return Speculation(drafter, count, times, unmasked=recurrent)


def make_default(
    language: LanguageModel,
    config: EngineConfig,
    runner: Runner,
    scheduling: SchedulerConfig,
    *,
    new_core: NewCore,
) -> Speculation | None:
    """Return the speculation that "auto" has chosen, unless it cannot run or pay.

    The reason is logged.
    """
    try:
        found = make_speculation(
            language, config, runner, scheduling, new_core=new_core
        )
    except InlError as error:
        reason = str(error)
    else:
        rows = min(config.max_batch or runner.limits.slots, runner.limits.slots - 1)
        buckets = Buckets(
            runner.limits, token_budget=scheduling.token_budget, max_rows=rows
        )
        if found.followed is None or found.followed.pays(1, buckets):
            return found
        found.drafter.close()
        reason = "verifying drafts takes longer than it saves on this device"
    if isinstance(runner, LocalRunner):
        runner.reset()
        runner.read_taps(False)
    log.info("%s: runs without speculation: %s", language.name, reason)
    return None


def _drafter(
    language: LanguageModel,
    config: EngineConfig,
    runner: Runner,
    scheduling: SchedulerConfig,
    new_core: NewCore,
) -> Drafter:
    if config.speculation not in (None, *OWN_DRAFTERS):
        assert config.speculation is not None, "tested above"
        return make_plugin_drafter(
            config.speculation, _target(language, config, runner, scheduling)
        )
    head = find_head(language, config)
    if head is not None:
        return _eagle_drafter(head, language, config, runner)
    if config.draft_model is None:
        return NgramDrafter()
    draft = open_model(resolve_model(config.draft_model))
    if is_recurrent(draft):
        raise RequestError(
            f"EngineConfig.draft_model: found {draft.name}, whose state cannot go back "
            "to before a rejected token; accepted: a model without recurrent layers"
        )
    check_tokenizers(language, draft)
    device = config.draft_backend or config.backend
    own = replace(
        config, backend=device, speculation=None, draft_model=None, draft_backend=None,
        max_drafts=None, quantize=None, sampling="greedy", trace=None,
        tensor_parallel=1, mesh=None, placement=None,
        context=min(scheduling.context or 0, draft.config.max_tokens) or None,
    )  # fmt: skip
    runner = start(draft, own).runner
    limits = runner.limits
    settings = replace(
        scheduling,
        context=min(draft.config.max_tokens, limits.max_tokens),
        token_budget=limits.token_budget,
        eos_ids=frozenset(),
        prefix_cache=True,
        replay=is_replayed(draft),
    )
    vocab = language.config.vocab_size
    if not config.adaptive_drafts:
        return ModelDrafter(new_core(runner, settings), vocab=vocab)
    times = measure_step_times(runner, limits.slots - 1, width=1)
    token_seconds = measure_token_seconds(runner)
    return ModelDrafter(
        new_core(runner, settings), vocab=vocab, times=times,
        token_seconds=token_seconds,
    )  # fmt: skip


def _target(
    language: LanguageModel,
    config: EngineConfig,
    runner: Runner,
    scheduling: SchedulerConfig,
) -> DraftTarget:
    limits = runner.limits
    return DraftTarget(
        path=language.checkpoint.path,
        vocab=language.config.vocab_size,
        tokenizer=_tokenizer(language),
        context=scheduling.context or limits.max_tokens,
        sequences=min(config.max_batch or limits.slots, limits.slots - 1),
        max_drafts=config.draft_limit,
        draft_model=config.draft_model,
    )


def _eagle_drafter(
    head: DraftHead, language: LanguageModel, config: EngineConfig, runner: Runner
) -> EagleDrafter:
    if not isinstance(runner, LocalRunner) or runner.loaded.ranks > 1:
        raise RequestError(
            f"EngineConfig.speculation: found {config.speculation!r} on "
            f"{config.backend}, where hidden states would have to leave the process "
            "that computes them; accepted: a device of this process, or None, ngram or "
            "model"
        )
    place = head_place(language.name, config, runner.limits)
    executor = DraftExecutor(head, runner, **place)
    return EagleDrafter(runner, executor, head.tokens, **place)


def head_place(name: str, config: EngineConfig, limits: Limits) -> dict[str, int]:
    """Return the cache group and the blocks of a slot of a draft head.

    name: of the target. Raises :class:`~inl.errors.RequestError` if all its layers have
    attention windows.
    """
    windows = limits.windows or (None,) * limits.groups
    if None not in windows:
        raise RequestError(
            f"EngineConfig.speculation: found {config.speculation!r}, but all layers "
            f"of {name} have attention windows {windows}; accepted: None, ngram or "
            "model"
        )
    scratch = draft_blocks(config.draft_limit, limits.block_size)
    return {"group": windows.index(None), "scratch": scratch}


def check_tokenizers(target: LanguageModel, draft: LanguageModel) -> None:
    """Raise :class:`~inl.errors.RequestError` unless both models have equal tokens."""
    ours, theirs = _tokenizer(target), _tokenizer(draft)
    if ours is None or theirs is None:
        sizes = target.config.vocab_size, draft.config.vocab_size
        if sizes[0] == sizes[1]:
            return
        difference = f"a vocabulary of {sizes[1]}, {target.name} has {sizes[0]}"
    else:
        vocabularies = [each.rules.get_vocab() for each in (ours, theirs)]
        if vocabularies[0] == vocabularies[1]:
            return
        known = {index: token for token, index in vocabularies[0].items()}
        other = {index: token for token, index in vocabularies[1].items()}
        ids = known.keys() | other.keys()
        at = min(index for index in ids if known.get(index) != other.get(index))
        difference = (
            f"token {at} is {other.get(at)!r:.40}, {target.name} has "
            f"{known.get(at)!r:.40}"
        )
    raise RequestError(
        f"EngineConfig.draft_model: {draft.name} has another tokenizer: {difference}; "
        "accepted: a model of the same family"
    )


def _tokenizer(model: LanguageModel) -> Tokenizer | None:
    """Return a model's tokenizer, ``None`` if it has none."""
    try:
        return model.checkpoint.tokenizer()
    except TokenizerNotFound:
        return None
