"""Lists the op calls of a model, from its file or from a config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from inl.backend.base import Backend
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.errors import RequestError, TokenizerNotFound
from inl.executor.load_plan import LoadPlan, compute_dtype
from inl.executor.model_loader import LanguageModel, open_model
from inl.models.registry import find_model
from inl.spec.cache import Paged
from inl.spec.limits import Limits
from inl.spec.op import CATALOG, OpSpec, Spec
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.spec.workload import TuningResults, Workload, workload
from inl.weights.sources import stored_tensors

if TYPE_CHECKING:
    from inl.dtypes import HostArray
    from inl.text.tokenizer import Tokenizer

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        **LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "8b": {
        **LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Name -> config of models that can be tuned without a file."""


class Call(NamedTuple):
    """Call of an op by a model, with specs in place of tensors."""

    work: Workload
    spec: OpSpec
    args: tuple[Any, ...]
    attrs: dict[str, Any]


def plan_decoding(
    backend: Backend, model: str | None, dtype: str, rows: int
) -> LoadPlan:
    """Return the plan of an engine that decodes ``rows`` sequences.

    Kernels are selected without tuning results. model: one of :data:`SHAPES`, a
    ``config.json``, or a folder, file or name. Raises
    :class:`~inl.errors.ModelError`.
    """
    language = _open(model, compute_dtype(backend, dtype))
    paged = [
        item
        for item in language.model.state(language.config)
        if isinstance(item, Paged)
    ]
    size = backend.traits.block_size
    max_blocks = min(-(-language.config.max_tokens // size), 1 << 16)
    limits = Limits(
        slots=rows + 1, blocks=(max_blocks + 1,) * len(paged), block_size=size,
        max_blocks_per_seq=max_blocks, vocab=language.config.vocab_size,
        sampler="greedy",
        windows=tuple(group.window for group in paged),
    )  # fmt: skip
    plan = LoadPlan.of(language, backend, EngineConfig(dtype=dtype), limits=limits)
    language.checkpoint.close()
    selection = replace(plan.unloaded.selection, tuning_results=TuningResults())
    return replace(plan, unloaded=replace(plan.unloaded, selection=selection))


def calls(plan: LoadPlan) -> list[Call]:
    """Return the calls of a step that decodes as many sequences as the plan has room.

    In order; calls of the same workload are listed once.
    """
    rows = plan.limits.slots - 1
    traced = plan.tracer(Bucket(tokens=rows, rows=rows))
    unique: dict[Workload, Call] = {}
    for (op, _), (args, attrs) in traced.calls.items():
        work = workload(CATALOG[op], args, attrs)
        unique.setdefault(work, Call(work, CATALOG[op], args, attrs))
    return list(unique.values())


def _open(model: str | None, dtype: str) -> LanguageModel:
    name = model or ""
    if name in SHAPES or name.endswith(".json"):
        hf = SHAPES.get(name) or read_json(Path(name))
        definition = find_model(hf, Path(name))
        config = definition.config(hf)
        stored = {
            source: Spec(shape, dtype)
            for group in leaves(definition.weights(config))
            for param in group.params.values()
            for source, shape in stored_tensors(param).items()
        }
        return LanguageModel(definition, config, ShapesOnly(Path(name), hf, stored))
    return open_model(resolve_model(model))


@final
class ShapesOnly(Checkpoint):
    """A checkpoint of a config, whose tensors have shapes and no data."""

    eos_token_ids = ()
    chat_template = None

    def __init__(
        self, path: Path, config: Mapping[str, Any], stored: Mapping[str, Spec]
    ) -> None:
        self.path, self.config, self._stored = path, config, stored

    def names(self) -> list[str]:
        return list(self._stored)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        spec = self._stored[name]
        return spec.dtype, spec.shape

    def tensor(self, name: str) -> HostArray:
        raise self.missing(name)

    def tokenizer(self) -> Tokenizer:
        raise TokenizerNotFound(f"{self.path}: has no tokenizer")

    def close(self) -> None:
        pass


def filter_calls(tunable: list[Call], ops: tuple[str, ...]) -> list[Call]:
    """Return the calls of the named ops; of all ops if none is named.

    Raises :class:`~inl.errors.RequestError` for an op that is not among the calls.
    """
    names = {call.spec.name for call in tunable}
    if unknown := sorted(set(ops) - names):
        raise RequestError(
            f"ops: found {', '.join(unknown)}; tunable ops of this model on this "
            f"device: {', '.join(sorted(names)) or 'none'}"
        )
    return [call for call in tunable if not ops or call.spec.name in ops]
