"""Which calls a model makes: of a file, or of a config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from inl.backend.base import Backend
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
from inl.weights.files import read_json
from inl.weights.hub import resolve_model
from inl.weights.loader import stored_specs
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
"""Models by name of which only the sizes are needed."""


class Call(NamedTuple):
    """One op as a model calls it, on specs."""

    work: Workload
    spec: OpSpec
    args: tuple[Any, ...]
    attrs: dict[str, Any]


def calls(
    backend: Backend, policy: KernelSelection, model: str | None, dtype: str, rows: int
) -> list[Call]:
    """Ops that decoding ``rows`` sequences meets, each workload once, in their order.

    model: one of :data:`SHAPES`, a ``config.json``, or a folder, file or name. Raises
    :class:`~inl.errors.ModelError`.
    """
    dtype = compute_dtype(backend, dtype)
    found, config, stored = _opened(model, dtype)
    config = replace(config, dtype=dtype)
    groups = plan_weights(found.weights(config), policy.kernels, stored)
    paged = [item for item in found.state(config) if isinstance(item, Paged)]
    size = backend.traits.block_size
    width = min(-(-config.max_tokens // size), 1 << 16)
    limits = Limits(
        rows + 1, (width + 1,) * len(paged), size, width, config.vocab_size,
        sampler="greedy", windows=tuple(group.window for group in paged),
    )  # fmt: skip
    traced = trace(found, config, groups, Bucket(rows, rows), limits, policy)
    made: dict[Workload, Call] = {}
    for (op, _), (args, attrs) in traced.calls.items():
        work = workload(CATALOG[op], args, attrs)
        made.setdefault(work, Call(work, CATALOG[op], args, attrs))
    return list(made.values())


def _opened(model: str | None, dtype: str) -> tuple[Model, Any, dict[str, Spec]]:
    name = model or ""
    if name in SHAPES or name.endswith(".json"):
        hf = SHAPES.get(name) or read_json(Path(name))
        found = find_model(hf, Path(name))
        config = found.config(hf)
        stored = {
            source: Spec(shape, dtype)
            for group in leaves(found.weights(config))
            for param in group.params.values()
            for source, shape in stored_tensors(param).items()
        }
        return found, config, stored
    language = open_model(resolve_model(model))
    specs = stored_specs(language.checkpoint)
    language.checkpoint.close()
    return language.model, language.config, dict(specs)


def chosen(made: list[Call], ops: tuple[str, ...]) -> list[Call]:
    """Those of the named ops. Raises ``RequestError`` for one that is not met."""
    met = {call.spec.name for call in made}
    if unknown := sorted(set(ops) - met):
        raise RequestError(
            f"ops: found {', '.join(unknown)}, of which there is nothing to tune here; "
            f"there is of: {', '.join(sorted(met)) or 'none'}"
        )
    return [call for call in made if not ops or call.spec.name in ops]
