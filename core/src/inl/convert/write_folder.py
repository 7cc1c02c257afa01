"""Writes a model folder in the Hugging Face layout, one tensor at a time."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.blocks.dtypes import CHUNK, convert, dequantize
from inl.checkpoints.causal import TEXT
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.files.new_file import check_space, new_folder
from inl.checkpoints.files.safetensors_writer import SafetensorsWriter, header
from inl.checkpoints.gguf.checkpoint import GgufCheckpoint
from inl.checkpoints.gguf.file import GgufFile
from inl.checkpoints.quantized.kv_cache_scheme import FIELD
from inl.convert import compressed
from inl.convert.gguf_fields import READ_ONLY, RECURRENT
from inl.convert.write_gguf import Written, threads
from inl.dtypes import FLOATS, HostArray
from inl.errors import CheckpointError, TokenizerNotFound
from inl.weights.finite import check_finite
from inl.weights.quantize.report import LayerError, QuantizationReport
from inl.weights.quantize.select import layer_matrices

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint
    from inl.executor.model_loader import LanguageModel

WEIGHTS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".onnx", ".h5",
    ".msgpack", ".partial",
)  # fmt: skip
"""Suffixes of files that are not copied."""
MAX_COPIED: Final = 64 << 20
"""Size limit in bytes of a file that is copied."""
TEMPLATES: Final = "additional_chat_templates"
EXPERTS: Final = re.compile(r"(.*\.experts)\.(\w+)\.weight")
PADDING: Final = "tokenizer.ggml.padding_token_id"
DTYPES: Final = ("float32", "bfloat16", "float16")


def write_folder(
    language: LanguageModel,
    path: Path,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write a model to the folder ``path`` as safetensors.

    kind: "fp8", "int8" or "int4" for the matrices of layers, else floats. dtype: of all
    floats; by default that of the matrices in the file, bfloat16 of quantized ones.
    progress: called with bytes (done, total). Raises :class:`CheckpointError`; the
    folder appears only when it is complete.
    """
    checkpoint = language.checkpoint
    _refuse(checkpoint)
    target = dtype or _dtype(checkpoint)
    modules = _quantized(language, kind)
    stored = list(_stored(checkpoint, modules, kind, target))
    specs = {name: spec for _, parts in stored for name, spec in parts.items()}
    _, size = header(specs)
    check_space(path, size)
    config = _config(checkpoint, target)
    if kind is not None:
        config[FIELD] = compressed.config(kind, _ignored(checkpoint, modules))
    measured: list[LayerError] = []
    with new_folder(path) as folder, ThreadPoolExecutor(threads()) as pool:
        _write_json(folder / "config.json", config)
        _write_texts(checkpoint, folder)
        with (folder / "model.safetensors").open("wb") as file:
            writer = SafetensorsWriter(file, specs)
            for done, (source, parts) in enumerate(stored, 1):
                array = checkpoint.tensor(source)
                check_finite(array, f"tensor {source!r}")
                if source in modules and kind is not None:
                    arrays, error = _compressed(array, source, kind, target, pool)
                    measured.append(error)
                else:
                    arrays = _plain(array, list(parts), target, source)
                for name, part in zip(parts, arrays, strict=True):
                    writer.write(name, part)
                if progress is not None:
                    progress(size * done // len(stored), size)
    return Written(path, size, QuantizationReport(kind or target, tuple(measured)))


def _refuse(checkpoint: Checkpoint) -> None:
    """Raise for a model that would not be read as it was."""
    if checkpoint.path.suffix == ".gguf":
        name = GgufFile(checkpoint.path).metadata["general.architecture"]
        is_adapted = not isinstance(checkpoint, GgufCheckpoint)
        refused = is_adapted or name in (*RECURRENT, *READ_ONLY, "gpt-oss")
        if refused or not checkpoint.config["architectures"]:
            raise CheckpointError(
                f"{checkpoint.path}: general.architecture: found {name!r}, which is "
                "not converted; accepted: files of families without recurrent layers, "
                "layers that draft and experts with biases"
            )
    elif TEXT in read_json(checkpoint.path / "config.json", checkpoint.path):
        raise CheckpointError(
            f"{checkpoint.path}: config field {TEXT!r}: found a model of images and "
            "text; accepted: a model of text alone"
        )


def _dtype(checkpoint: Checkpoint) -> str:
    """Return the float dtype of most matrices, bfloat16 of quantized ones."""
    counts: dict[str, int] = {}
    for name in checkpoint.names():
        dtype, shape = checkpoint.spec(name)
        if len(shape) > 1:
            counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
    most = max(counts, key=lambda dtype: counts[dtype], default="bfloat16")
    return most if most in DTYPES else "bfloat16"


def _quantized(language: LanguageModel, kind: str | None) -> frozenset[str]:
    if kind is None:
        return frozenset()
    checkpoint = language.checkpoint
    names = layer_matrices(language.model, language.config, checkpoint, kind)
    return frozenset(
        name
        for name in names
        if name.endswith(".weight") and compressed.fits(checkpoint.spec(name)[1], kind)
    )


def _stored(
    checkpoint: Checkpoint, modules: frozenset[str], kind: str | None, target: str
) -> Iterator[tuple[str, compressed.Specs]]:
    """Yield each tensor's name with dtype and shape of what it is stored as."""
    for name in checkpoint.names():
        dtype, shape = checkpoint.spec(name)
        match = EXPERTS.fullmatch(name)
        if name in modules and kind is not None:
            scale = "float16" if target == "float32" else target
            yield name, compressed.specs(name.removesuffix(".weight"), shape, kind,
                                         scale)  # fmt: skip
        elif match and len(shape) == 3 and isinstance(checkpoint, GgufCheckpoint):
            parts = (f"{match[1]}.{each}.{match[2]}.weight" for each in range(shape[0]))
            yield name, dict.fromkeys(parts, (target, shape[1:]))
        else:
            plain = dtype in ("int64", "int32", "int16", "int8", "uint8", "bool")
            yield name, {name: (dtype if plain else target, shape)}


def _plain(
    array: HostArray, names: list[str], target: str, source: str
) -> list[HostArray]:
    """Return a tensor as floats: whole, or its entries if it has several names."""
    is_float = array.dtype in FLOATS or array.dtype not in np.sctypeDict
    if is_float:
        array = convert(array, target, source)
    if len(names) == 1:
        return [array]
    return [HostArray(each, array.dtype, array.shape[1:]) for each in array.data]


def _compressed(
    array: HostArray, name: str, kind: str, target: str, pool: ThreadPoolExecutor
) -> tuple[list[HostArray], LayerError]:
    """Quantize a matrix; return its tensors in the order of their specs."""
    scale = "float16" if target == "float32" else target
    rows, columns = array.shape
    step = max(CHUNK // columns, 1)
    data = array.data.reshape(rows, -1)

    def quantize(start: int) -> tuple[HostArray, HostArray, float, float]:
        part = data[start : start + step]
        piece = HostArray(part, array.dtype, (len(part), columns))
        values = dequantize(piece, name)
        codes, scales, decoded = compressed.quantize(values, kind, scale)
        check_finite(scales, f"tensor {name!r}: scales")
        change = decoded - values
        return (
            codes,
            scales,
            float(np.vdot(change, change)),
            float(np.vdot(values, values)),
        )

    found = list(pool.map(quantize, range(0, rows, step)))
    joined = [
        _concatenated([codes for codes, *_ in found]),
        _concatenated([scales for _, scales, *_ in found]),
    ]
    if kind in compressed.BITS:
        joined.append(compressed.shape_tensor(array.shape))
    change = math.fsum(squares for *_, squares, _ in found)
    norm = math.fsum(squares for *_, squares in found)
    error = LayerError(
        name,
        math.sqrt(change / norm) if norm else 0.0,
        array.data.nbytes,
        sum(part.data.nbytes for part in joined),
        math.sqrt(norm),
    )
    return joined, error


def _concatenated(arrays: list[HostArray]) -> HostArray:
    data = np.concatenate([array.data for array in arrays])
    return HostArray(data, arrays[0].dtype, data.shape)


def _ignored(checkpoint: Checkpoint, modules: frozenset[str]) -> Iterator[str]:
    """Yield the modules of matrices that are not quantized; the embedding is none."""
    yield "lm_head"
    for name in checkpoint.names():
        is_matrix = len(checkpoint.spec(name)[1]) > 1 and name.endswith(".weight")
        if is_matrix and name not in modules and "embed_tokens" not in name:
            yield name.removesuffix(".weight")


def _config(checkpoint: Checkpoint, target: str) -> dict[str, Any]:
    """Return the fields of ``config.json``."""
    dropped = (FIELD, "torch_dtype", "dtype")
    fields = {
        name: value
        for name, value in checkpoint.config.items()
        if name not in dropped
        and not (value is None and isinstance(checkpoint, GgufCheckpoint))
    }
    ends = fields.get("eos_token_id")
    if isinstance(ends, list) and len(ends) == 1:
        fields["eos_token_id"] = ends[0]
    if isinstance(checkpoint, GgufCheckpoint):
        padding = GgufFile(checkpoint.path).metadata.get(PADDING)
        fields["pad_token_id"] = padding  # also null: families have defaults
    return fields | {"torch_dtype": target}


def _write_texts(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer and what belongs to it."""
    if isinstance(checkpoint, GgufCheckpoint):
        _write_tokenizer(checkpoint, folder)
        return
    for item in sorted(checkpoint.path.iterdir()):
        if item.name == TEMPLATES and item.is_dir():
            shutil.copytree(item, folder / item.name)
        elif (
            item.is_file()
            and item.name != "config.json"
            and not item.name.endswith(WEIGHTS)
            and item.stat().st_size <= MAX_COPIED
        ):
            shutil.copyfile(item, folder / item.name)


def _write_tokenizer(checkpoint: GgufCheckpoint, folder: Path) -> None:
    """Write a GGUF file's vocabulary and chat template as the files of a folder."""
    from inl.text.gguf_vocabulary import read_tokenizer

    ends = list(checkpoint.eos_token_ids)
    ids = {"eos_token_id": ends, "bos_token_id": checkpoint.config.get("bos_token_id")}
    generation = {name: value for name, value in ids.items() if value not in (None, [])}
    _write_json(folder / "generation_config.json", generation)
    try:
        checkpoint.tokenizer()
    except TokenizerNotFound:
        return
    metadata = GgufFile(checkpoint.path).metadata
    rules = read_tokenizer(metadata, str(checkpoint.path)).rules
    (folder / "tokenizer.json").write_text(rules.to_str(), "utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= checkpoint.special_tokens
    template = checkpoint.chat_template
    if template is not None:
        (folder / "chat_template.jinja").write_text(template.source, "utf-8")
        if template.tool_use is not None:
            (folder / TEMPLATES).mkdir()
            file = folder / TEMPLATES / "tool_use.jinja"
            file.write_text(template.tool_use.source, "utf-8")
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")
