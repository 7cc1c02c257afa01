"""Facts about a model, read from its files without loading weights."""

from __future__ import annotations

from typing import Any

from inl.checkpoints.blocks.dtypes import packed_bytes
from inl.checkpoints.causal import causal
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.hub.resolve import resolve_model
from inl.cli.devices import show_bytes
from inl.errors import CheckpointError, InlError, MissingPackage
from inl.executor.checkpoint_formats import open_checkpoint
from inl.executor.model_loader import open_model
from inl.models.registry import names_of
from inl.plugin import registry
from inl.weights.load import stored_specs

FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
)
"""Config fields shown when present."""


def model_facts(model: str) -> dict[str, Any]:
    """Collect facts about a model from its files.

    An unknown architecture or mismatched tensors are reported under "problem". Raises
    :class:`~inl.errors.CheckpointError` if the files cannot be read.
    """
    path = resolve_model(model)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    names = [name for name in config.get("architectures") or [] if name]
    tensors = _tensors(checkpoint)
    facts = {
        "path": str(path),
        "architecture": names[0] if names else None,
        "plugin": _plugin(checkpoint),
        "parameters": sum(row["parameters"] for row in tensors.values()),
        "bytes": sum(row["bytes"] for row in tensors.values()),
        "context": config.get("max_position_embeddings"),
        "chat_template": checkpoint.chat_template is not None,
        "tokenizer": _tokenizer(checkpoint),
        "eos_token_ids": list(checkpoint.eos_token_ids),
        "tensors": tensors,
        "config": {name: config[name] for name in FIELDS if name in config},
        "problem": _problem(path),
    }
    checkpoint.close()
    return facts


def _plugin(checkpoint: Checkpoint) -> str | None:
    """Return the plugin of the model that :func:`find_model` finds, or ``None``."""
    try:
        config = causal(checkpoint).config
    except CheckpointError:
        return None
    known = registry().models()
    names = names_of(config)
    return next((known[name].package for name in names if name in known), None)


def _tensors(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    rows: dict[str, dict[str, int]] = {}
    for spec in stored_specs(checkpoint).values():
        row = rows.setdefault(spec.dtype, {"tensors": 0, "parameters": 0, "bytes": 0})
        size = 1
        for length in spec.shape:
            size *= length
        row["tensors"] += 1
        row["parameters"] += size
        row["bytes"] += packed_bytes(spec.shape, spec.dtype)
    return dict(sorted(rows.items(), key=lambda item: -item[1]["bytes"]))


def _tokenizer(checkpoint: Checkpoint) -> str:
    try:
        return f"{checkpoint.tokenizer().vocab_size} tokens"
    except MissingPackage as error:
        return f"not read: {error}"
    except InlError as error:
        return f"none: {error}"


def _problem(path: Any) -> str | None:
    """Return the reason why the model cannot run, or ``None``."""
    try:
        open_model(path).checkpoint.close()
    except InlError as error:
        return str(error)
    return None


def show_facts(facts: dict[str, Any]) -> str:
    """Format facts as aligned lines."""
    plugin = facts["plugin"] or "not registered by any plugin"
    lines = {
        "path": facts["path"],
        "architecture": f"{facts['architecture'] or 'not specified'} ({plugin})",
        "parameters": f"{facts['parameters']:,}",
        "weights": show_bytes(facts["bytes"]),
        "context": f"{facts['context']} tokens"
        if facts["context"]
        else "not specified",
        "chat template": "yes" if facts["chat_template"] else "no",
        "tokenizer": facts["tokenizer"],
        "end tokens": ", ".join(map(str, facts["eos_token_ids"])) or "none",
    }
    for dtype, row in facts["tensors"].items():
        lines[f"tensors {dtype}"] = (
            f"{row['tensors']} with {row['parameters']:,} parameters, "
            f"{show_bytes(row['bytes'])}"
        )
    lines |= {name: str(value) for name, value in facts["config"].items()}
    lines["runs here"] = f"no: {facts['problem']}" if facts["problem"] else "yes"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
