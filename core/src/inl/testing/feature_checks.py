"""Checks of optional features: inputs of tokens beside their ids, and encoders.

A backend without the kernels of a feature refuses by name what needs it, and these
checks require that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.backend.reference import ReferenceBackend
from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import rounded, widen
from inl.errors import NoKernel, ProtocolError
from inl.executor.encoder_executor import EncoderExecutor, load_encoder, padded
from inl.executor.model_loader import LanguageModel
from inl.models import bert, llama
from inl.models.views import views
from inl.runners.encoder_runner import EncoderRunner
from inl.runners.local_runner import start_runner
from inl.spec.embedded_rows import TokenInputs, token_inputs, with_inputs
from inl.spec.encoder import EncoderLayers, Pooling, TokenSequence
from inl.spec.model import ModelInputs
from inl.testing.check import Check, CheckFailed, Measure, require, worst
from inl.testing.oracle import Tiny, tinies
from inl.testing.play import admission, most_tokens, one_step
from inl.testing.runner_frames import first_blocks, some_ids
from inl.testing.tiny import MemoryCheckpoint, PlainInputs, plain_logits
from inl.testing.tiny_encoder import plain_encoding, tiny_bert

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.ops.protocol import Ops
    from inl.spec.limits import Limits
    from inl.spec.step import Step
    from inl.testing.target import Target

AXES = (0, 0, 1, 1, 1, 2, 2, 2)
"""Axis of each plane of the tiny model's heads."""
LAYER = 0
"""Layer after which features are added."""
SPAN = (3, 9)
"""Tokens of an image in a prompt."""
WINDOW = 4
"""Window of the first layer where spans are in such layers only."""
OTHER = 5
"""Id by which a second table is looked up where a token has an embedding."""
LENGTHS = (5, 1, 12, 3)
"""Tokens of the sequences of a batch."""


def feature_checks(target: Target) -> Iterator[Check]:
    """Check each feature on a tiny Llama and a tiny BERT, against float64."""
    checks: dict[str, Callable[[Tiny], Measure | None]] = {
        "axis_positions": partial(_inputs, "axis_positions"),
        "layer_features": partial(_inputs, "layer_features"),
        "spans": partial(_inputs, "spans"),
        "windowed_spans": partial(_inputs, "windowed_spans"),
        "embedded_id": partial(_inputs, "embedded_id"),
        "encoders": _encoders,
        "pooled": _pooled,
        "encoder_parts": _parts,
    }
    for tiny in tinies(target):
        for name, run in checks.items():
            yield Check("feature", f"feature/{name}/{tiny.dtype}", partial(run, tiny))


def has_kernel(target: Target, op: str) -> bool:
    """Whether the backend has a kernel of an op."""
    return any(kernel.op == op for kernel in target.selection.kernels)


def _inputs(feature: str, tiny: Tiny) -> Measure | None:
    """Compute a prompt with inputs of its tokens, then one without, then it again."""
    target = tiny.target
    if feature in SPANS and not has_kernel(target, "span_attention"):
        _refuses_spans(tiny)
        return None
    prompts = [_Prompt(tiny, feature, number) for number in range(2)]
    limits = tiny.limits(**_fields(tiny, feature))
    found = _logits(tiny, feature, target.backend, limits, prompts)
    expected = [prompt.logits() for prompt in prompts]
    reference = ReferenceBackend(Device("reference"), dtype=tiny.dtype)
    exact = _logits(tiny, feature, reference, limits, prompts)
    measures = []
    for got, want, near in zip(found, expected, exact, strict=True):
        error = float(np.abs(got - want).max())
        bound = 4 * float(np.abs(near - want).max()) + 1e-6 * float(np.abs(want).max())
        require(
            error <= bound,
            f"{feature} of the tokens of a step in {tiny.dtype}: error {error:.3g} > "
            f"{bound:.3g} of the logits of a tiny Llama, four times the rounding "
            f"error, in one of the programs logits and logits_embedded; seed "
            f"{target.seed}",
            Measure(error, bound),
        )
        measures.append(Measure(error, bound))
    return worst(measures)


SPANS = ("spans", "windowed_spans")


def _fields(tiny: Tiny, feature: str) -> dict[str, Any]:
    """Return the fields of :class:`Limits` of a feature."""
    fields: dict[str, dict[str, Any]] = {
        "axis_positions": {"axes": 3},
        "layer_features": {"feature_layers": (LAYER,)},
        "spans": {"spans": True},
        # A cache group of the layers with a window, and one of the others.
        "windowed_spans": {"spans": True, "blocks": tiny.limits().blocks * 2},
        "embedded_id": {},
    }
    return {"embedding": 64, **fields[feature]}


class _Prompt:
    """A prompt with an image, a row of embeddings for each token of a span."""

    def __init__(self, tiny: Tiny, feature: str, number: int) -> None:
        rng = tiny.target.rng(feature, number)
        self.tiny, self.feature = tiny, feature
        self.ids = some_ids(tiny, 14, feature, number)
        first, end = SPAN
        draw = rng.standard_normal((2, end - first, 64)).astype(np.float32)
        rows, added = (rounded(part, tiny.dtype) for part in draw)
        self.rows = dict(zip(range(first, end), rows, strict=True))
        self.added = dict(zip(range(first, end), added, strict=True))
        self.places = np.arange(14) + rng.integers(-2, 9, (3, 14)) * (np.arange(14) > 2)

    def inputs(self, limits: Limits) -> TokenInputs:
        """Return the inputs of the step that computes all tokens."""
        given: dict[str, Any] = {}
        if self.feature == "axis_positions":
            shifts = self.places - np.arange(14)
            given["offsets"] = dict(enumerate(shifts.T))
        elif self.feature == "layer_features":
            given["features"] = {at: row[None] for at, row in self.added.items()}
        elif self.feature in SPANS:
            given["spans"] = dict.fromkeys(self.rows, SPAN)
        return token_inputs(limits, self.rows, **given)

    def logits(self) -> Any:
        """Return the oracle's logits [V] after the last token."""
        turns = np.arange(14)[:, None]
        features = {}
        if self.feature == "axis_positions":
            turns = self.places[list(AXES)].T
        if self.feature == "layer_features":
            dense = np.zeros((14, 64))
            for at, row in self.added.items():
                dense[at] = row
            features[LAYER] = dense
        span = SPAN if self.feature in SPANS else (0, 0)
        given = PlainInputs(self.rows, turns, span, features)
        if self.feature == "windowed_spans":
            given = given._replace(windows={0: WINDOW})
        if self.feature == "embedded_id":
            looked_up = [OTHER if at in self.rows else id_
                         for at, id_ in enumerate(self.ids)]  # fmt: skip
            given = given._replace(table_ids=looked_up)
        hf, tensors = _files(self.tiny, self.feature)
        return plain_logits(hf, tensors, self.ids, inputs=given)[-1]


def _files(tiny: Tiny, feature: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the tiny model and its tensors.

    Where spans are in layers with a window only, a third layer follows, by which the
    others are seen: the last one is computed for the sampled token alone.
    """
    if feature != "windowed_spans":
        return dict(tiny.hf), dict(tiny.tensors)
    first = "model.layers.0."
    again = {
        name.replace(first, "model.layers.2."): x
        for name, x in tiny.tensors.items()
        if name.startswith(first)
    }
    return {**tiny.hf, "num_hidden_layers": 3}, {**tiny.tensors, **again}


def _model(tiny: Tiny, feature: str) -> LanguageModel:
    inputs = {
        "axis_positions": ModelInputs(axes=3),
        "layer_features": ModelInputs(feature_layers=(LAYER,)),
        "spans": ModelInputs(spans=True),
        "windowed_spans": ModelInputs(spans=True, windowed_spans=True),
        "embedded_id": ModelInputs(embedded_id=OTHER),
    }[feature]
    hf, tensors = _files(tiny, feature)
    config = llama.MODEL.config(hf)
    if feature == "axis_positions":
        config = replace(config, rope_scaling=config.rope_scaling._replace(axes=AXES))
    if feature == "windowed_spans":
        windows = (WINDOW, *[None] * (config.layers - 1))
        config = replace(config, views=views(windows))
    model = replace(llama.MODEL, inputs=lambda _config: inputs)
    if feature == "embedded_id":
        model = replace(model, embed=_embed_twice)
    checkpoint: Any = MemoryCheckpoint(hf, tensors)
    return replace(tiny.language, model=model, config=config, checkpoint=checkpoint)


def _embed_twice(ops: Ops, c: Any, w: Any, step: Step) -> Any:
    """Embed the tokens, and add what a second lookup gives."""
    carry = llama.embed(ops, c, w, step)
    return carry._replace(residual=carry.residual + ops.embedding(step.tokens, w.embed))


def _logits(
    tiny: Tiny, feature: str, backend: Backend, limits: Limits,
    prompts: Sequence[_Prompt],
) -> list[Any]:  # fmt: skip
    """Return the logits [V] of each prompt."""
    config = EngineConfig(backend=backend.device, dtype=tiny.dtype)
    language = _model(tiny, feature)
    runner = start_runner(language, backend, config, limits=limits)
    limits = runner.limits
    try:
        if most_tokens(limits, 14) < 14:
            raise CheckFailed(f"{feature}: buckets have no room for 14 tokens")
        found = []
        for step, prompt in enumerate(prompts, start=1):
            runner.submit(admission(limits, 1, first_blocks(runner, 20)))
            frame = one_step(limits, [(1, prompt.ids)], step=step, decoding=0)
            frame = with_inputs(frame, prompt.inputs(limits), limits)
            found.append(widen(runner.logits(frame))[0].astype(np.float64))
        return found
    finally:
        runner.close()


def _refuses_spans(tiny: Tiny) -> None:
    """Without a kernel the runner takes no spans, and a frame of them is refused."""
    prompt = _Prompt(tiny, "spans", 0)
    runner = tiny.runner(embedding=64)
    wanted = replace(runner.limits, spans=True)
    try:
        runner.submit(admission(runner.limits, 1, first_blocks(runner, 20)))
        frame = one_step(wanted, [(1, prompt.ids)], step=1, decoding=0)
        runner.submit(with_inputs(frame, prompt.inputs(wanted), wanted))
    except ProtocolError:
        return
    finally:
        runner.close()
    raise CheckFailed("spans: a runner without them accepted a frame with spans")


def _encoders(tiny: Tiny) -> Measure | None:
    """Hidden states of the first tokens, of sequences of several lengths."""
    return _encoded(tiny, Pooling("first", unit=False), 0)


def _pooled(tiny: Tiny) -> Measure | None:
    """Each pooling, lengths of 1, and a head that classifies."""
    ways = ((Pooling("mean"), 0), (Pooling("last", unit=False), 0), (Pooling(), 3))
    measures = [_encoded(tiny, way, labels) for way, labels in ways]
    found = [measure for measure in measures if measure is not None]
    return worst(found) if found else None


def _encoded(tiny: Tiny, pooling: Pooling, labels: int) -> Measure | None:
    """Encode batches of the same sizes and of others, and compare with the oracle."""
    target = tiny.target
    hf, tensors = tiny_bert(target.rng("bert"), labels)
    tensors = {name: rounded(x, tiny.dtype) for name, x in tensors.items()}
    checkpoint = MemoryCheckpoint(hf, tensors)
    config = replace(bert.MODEL.config(hf), pooling=pooling)
    language = LanguageModel(bert.MODEL, config, checkpoint)  # type: ignore[arg-type]
    needed = ("full_attention", "pool", *["unit_rows"] * pooling.unit)
    missing = [op for op in needed if not has_kernel(target, op)]
    options = EngineConfig(backend=target.device, dtype=tiny.dtype)
    if missing:
        _refuses_encoders(language, target.backend, options, missing[0])
        return None
    batches = [
        [some_ids(tiny, length, "bert", number) for length in lengths]
        for number, lengths in enumerate((LENGTHS, LENGTHS, LENGTHS[::-1], LENGTHS[2:]))
    ]
    runner = EncoderRunner(load_encoder(language, target.backend, options))
    reference = ReferenceBackend(Device("reference"), dtype=tiny.dtype)
    near_runner = EncoderRunner(load_encoder(language, reference, options))
    measures = []
    for batch in batches:
        sequences = [TokenSequence([at % hf["vocab_size"] for at in ids])
                     for ids in batch]  # fmt: skip
        found = runner.encode(sequences).astype(np.float64)
        near = near_runner.encode(sequences)
        expected = np.stack([
            plain_encoding(hf, tensors, each.tokens, pooling.kind, unit=pooling.unit)
            for each in sequences
        ])  # fmt: skip
        scale = float(np.abs(expected).max())
        error = float(np.abs(found - expected).max())
        bound = 4 * float(np.abs(near - expected).max()) + 1e-6 * scale
        what = "a head that classifies" if labels else f"pooling {pooling.kind}"
        require(
            error <= bound,
            f"the program encode of a tiny BERT in {tiny.dtype} with {what}: error "
            f"{error:.3g} > {bound:.3g}, four times the rounding error, for sequences "
            f"of {', '.join(str(len(ids)) for ids in batch)} tokens; seed "
            f"{target.seed}",
            Measure(error, bound),
        )
        measures.append(Measure(error, bound))
    runner.close()
    near_runner.close()
    return worst(measures)


LAYERED = replace(
    bert.MODEL,
    layers=EncoderLayers(
        lambda ops, c, w, batch: (bert.embed(ops, c, w, batch),),
        lambda ops, c, w, batch, arrays, index: (
            bert.layer(ops, c, w, batch, arrays[0], index),
        ),
    ),
    pool=lambda ops, c, w, hidden, batch: bert.pool(
        ops, c, w, hidden[0] if isinstance(hidden, tuple) else hidden, batch
    ),
)
"""BERT in parts, which steps may be computed between."""


def _parts(tiny: Tiny) -> Measure | None:
    """Two batches, whose parts are computed in turns, of the same and other sizes."""
    target, pooling = tiny.target, Pooling("mean", unit=False)
    hf, tensors = tiny_bert(target.rng("bert"), 0)
    tensors = {name: rounded(x, tiny.dtype) for name, x in tensors.items()}
    config = replace(bert.MODEL.config(hf), pooling=pooling)
    checkpoint: Any = MemoryCheckpoint(hf, tensors)
    language = LanguageModel(LAYERED, config, checkpoint)  # type: ignore[arg-type]
    options = EngineConfig(backend=target.device, dtype=tiny.dtype)
    if missing := [
        op for op in ("full_attention", "pool") if not has_kernel(target, op)
    ]:
        _refuses_encoders(language, target.backend, options, missing[0])
        return None
    reference = ReferenceBackend(Device("reference"), dtype=tiny.dtype)
    executors = [
        load_encoder(language, backend, options)
        for backend in (target.backend, reference)
    ]
    measures = []
    for number, sizes in enumerate((
        (LENGTHS, LENGTHS), (LENGTHS, LENGTHS[2:]), (LENGTHS[1:], LENGTHS[::-1]),
    )):  # fmt: skip
        batches = [
            [
                TokenSequence([at % hf["vocab_size"] for at in ids])
                for ids in (
                    some_ids(tiny, length, "parts", number, place) for length in lengths
                )
            ]
            for place, lengths in enumerate(sizes)
        ]
        found, near = (_in_turns(executor, batches) for executor in executors)
        for batch, got, close in zip(batches, found, near, strict=True):
            expected = np.stack([
                plain_encoding(hf, tensors, each.tokens, pooling.kind, unit=False)
                for each in batch
            ])  # fmt: skip
            error = float(np.abs(got - expected).max())
            bound = 4 * float(np.abs(close - expected).max())
            bound += 1e-6 * float(np.abs(expected).max())
            require(
                error <= bound,
                f"the programs encode_part of a tiny BERT in {tiny.dtype}, two batches "
                f"in turns: error {error:.3g} > {bound:.3g}, four times the rounding "
                f"error, for sequences of "
                f"{', '.join(str(len(each.tokens)) for each in batch)} tokens; seed "
                f"{target.seed}",
                Measure(error, bound),
            )
            measures.append(Measure(error, bound))
    for executor in executors:
        executor.release()
    return worst(measures)


def _in_turns(
    executor: EncoderExecutor, batches: Sequence[Sequence[TokenSequence]]
) -> list[Any]:
    """Return the results of batches, a part of each computed in turn."""
    encodings = []
    for batch in batches:
        tokens = sum(len(each.tokens) for each in batch)
        bucket = executor.bucket(tokens, len(batch))
        encodings.append(executor.begin(padded(batch, bucket), bucket))
    while not all(encoding.is_done for encoding in encodings):
        for encoding in encodings:
            encoding.advance(1)
    return [
        widen(encoding.results()[0])[: len(batch)].astype(np.float64)
        for encoding, batch in zip(encodings, batches, strict=True)
    ]


def _refuses_encoders(
    language: LanguageModel, backend: Backend, config: EngineConfig, op: str
) -> None:
    """Require that loading raises an error that names a missing op."""
    try:
        load_encoder(language, backend, config)
    except NoKernel as error:
        require(
            f"no kernel for {error.op}" in str(error),
            f"encoders: the error of a missing kernel names no op: {error}",
        )
        return
    raise CheckFailed(f"encoders: loaded without a kernel of {op}")
