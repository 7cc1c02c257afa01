"""Lists the op calls of a model, from its file or from a config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from inl.backend.base import Backend
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.hub.resolve import resolve_model
from inl.errors import RequestError
from inl.executor.model_loader import compute_dtype, open_model
from inl.executor.tracing import trace
from inl.models.registry import find_model
from inl.spec.cache import Paged
from inl.spec.limits import Limits
from inl.spec.model import Model
from inl.spec.op import CATALOG, OpSpec, Spec
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.spec.workload import Workload, workload
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights
from inl.weights.sources import stored_tensors

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


def calls(
    backend: Backend,
    selection: KernelSelection,
    model: str | None,
    dtype: str,
    rows: int,
) -> list[Call]:
    """Return the calls of a step that decodes ``rows`` sequences, in order.

    Calls of the same workload are listed once. model: one of :data:`SHAPES`, a
    ``config.json``, or a folder, file or name. Raises
    :class:`~inl.errors.ModelError`.
    """
    dtype = compute_dtype(backend, dtype)
    definition, config, stored = _open(model, dtype)
    config = replace(config, dtype=dtype)
    groups = plan_weights(definition.weights(config), selection.kernels, stored)
    paged = [item for item in definition.state(config) if isinstance(item, Paged)]
    size = backend.traits.block_size
    max_blocks = min(-(-config.max_tokens // size), 1 << 16)
    limits = Limits(
        rows + 1, (max_blocks + 1,) * len(paged), size, max_blocks, config.vocab_size,
        sampler="greedy", windows=tuple(group.window for group in paged),
    )  # fmt: skip
    traced = trace(definition, config, groups, Bucket(rows, rows), limits, selection)
    unique: dict[Workload, Call] = {}
    for (op, _), (args, attrs) in traced.calls.items():
        work = workload(CATALOG[op], args, attrs)
        unique.setdefault(work, Call(work, CATALOG[op], args, attrs))
    return list(unique.values())


def _open(model: str | None, dtype: str) -> tuple[Model, Any, dict[str, Spec]]:
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
        return definition, config, stored
    language = open_model(resolve_model(model))
    specs = stored_specs(language.checkpoint)
    language.checkpoint.close()
    return language.model, language.config, dict(specs)


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
