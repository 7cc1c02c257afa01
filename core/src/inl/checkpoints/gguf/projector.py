"""Vision encoders in GGUF files beside a language model's: ``mmproj`` of llama.cpp.

Such a file has the architecture "clip", its sizes as ``clip.vision.*``, and tensors of
the encoder and of what makes features of its output. It is presented with the names
and the config of the whole model in the Hugging Face layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Make, Piece
from inl.checkpoints.counts import MAX_LAYERS
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.gguf.checkpoint import GgufCheckpoint, unpermute
from inl.checkpoints.gguf.names import is_projector
from inl.checkpoints.gguf.special_tokens import vocabulary
from inl.dtypes import HostArray, widen, wrap
from inl.errors import CheckpointError

KIND: Final = "clip"
PROJECTOR: Final = "projector_type"
BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
"""Scalars of bounded linear layers, beside their weights."""
BLOCK: Final = re.compile(rf"v\.blk\.(\d+)\.(\w+)\.(weight|bias|{'|'.join(BOUNDS)})")
DEEPSTACK: Final = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
PATCH, NEXT_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
"""The convolution of patches; Qwen's files have one for each of two frames."""
UNUSED: Final = re.compile(r"v\.token_embd\.img_break|(mm\.)?a\..*")
"""Tensors that the language model has too, and those of an encoder of audio."""


@dataclass(frozen=True)
class Metadata:
    """Sizes of a file; raises :class:`CheckpointError` for a missing or wrong one."""

    values: Mapping[str, Any]
    where: Path

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a number of at least 1."""
        value = self.values.get(f"{KIND}.vision.{key}", default)
        if type(value) is not int or not 0 < value < 1 << 31:
            self.refuse(key, value, "an integer above 0")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """Return a number above 0."""
        value = self.values.get(f"{KIND}.vision.{key}", default)
        if type(value) not in (int, float) or not 1e-30 < value < 1e30:
            self.refuse(key, value, "a number above 0")
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """Return the three numbers of an array, which the file has to have."""
        value = np.asarray(self.values.get(f"{KIND}.vision.{key}", ()))
        if value.shape != (3,) or value.dtype.kind != "f":
            self.refuse(key, value.tolist(), "three numbers")
        return [float(str(each)) for each in value]

    def flags(self, key: str, count: int) -> list[bool]:
        """Return an array of bools; all false where the file has none."""
        value = self.values.get(f"{KIND}.vision.{key}")
        if value is None:
            return [False] * count
        flags = np.asarray(value)
        if flags.shape != (count,) or flags.dtype != np.bool_:
            self.refuse(key, flags.tolist(), f"{count} bools")
        return [bool(each) for each in flags]

    @property
    def activation(self) -> str:
        """The activation of the layers."""
        is_silu = self.values.get(f"{KIND}.use_silu") is True
        return "silu" if is_silu else "gelu_pytorch_tanh"

    def refuse(self, key: str, found: Any, accepted: str) -> None:
        raise CheckpointError(
            f"{self.where}: {KIND}.vision.{key}: found {show(found)}; accepted: "
            f"{accepted}"
        )


Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Projector:
    """Conventions of the files of one ``clip.projector_type``."""

    model_type: str
    """Of the whole model."""
    texts: tuple[str, ...]
    """Values of ``model_type`` of its language models."""
    token: str
    """Token at the place of a feature."""
    fields: Callable[[Metadata, Mapping[str, tuple[int, ...]]], Fields]
    """(metadata, shapes of tensors) -> fields of the whole model's config."""
    processor: Callable[[Metadata], Fields]
    """Fields of ``preprocessor_config.json`` but mean and deviation."""
    layer: str
    """Prefix of a layer's tensors, with its number as ``{}``."""
    modules: Mapping[str, str]
    """Modules of a layer."""
    names: Mapping[str, str]
    """Other tensors, without ``.weight`` and ``.bias`` where they are of a module."""
    changes: Mapping[str, Callable[[HostArray], HostArray]] = field(
        default_factory=dict
    )
    """What reverts the transformation of a tensor, by its name in the file."""
    is_permuted: bool = False
    """Whether rows of q and k are ordered for a rotation of adjacent pairs."""
    frames: bool = False
    """Whether the convolution of patches has one tensor for each of two frames."""
    flat_patches: bool = False
    """Whether patches are multiplied with a matrix, of pixels before channels."""


def _qwen_layer(more: Mapping[str, str]) -> dict[str, str]:
    return {
        "attn_qkv": "attn.qkv", "attn_q": "attn.qkv", "attn_k": "attn.qkv",
        "attn_v": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2",
        **more,
    }  # fmt: skip


SIGLIP_LAYER: Final = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
PIXTRAL_LAYER: Final = {
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj", "attn_out": "attention.o_proj",
    "ln1": "attention_norm", "ln2": "ffn_norm", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip


def _siglip_names(prefix: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{prefix}embeddings.patch_embedding",
        "v.position_embd": f"{prefix}embeddings.position_embedding",
        "v.post_ln": f"{prefix}post_layernorm",
    }


def _qwen25_fields(data: Metadata, _shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    layers = data.integer("block_count")
    period = data.integer("n_wa_pattern", layers + 1)
    return {"vision_config": {
        **_qwen_sizes(data, layers),
        "window_size": data.integer("window_size", 112),
        "fullatt_block_indexes": list(range(period - 1, layers, period)),
    }}  # fmt: skip


def _qwen3_fields(data: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    layers = data.integer("block_count")
    flags = data.flags("is_deepstack_layers", layers)
    places = shapes.get("v.position_embd.weight", (0,))[0]
    return {"vision_config": {
        **_qwen_sizes(data, layers),
        "num_position_embeddings": places,
        "deepstack_visual_indexes": [at for at, is_one in enumerate(flags) if is_one],
    }}  # fmt: skip


def _qwen_sizes(data: Metadata, layers: int) -> Fields:
    return {
        "depth": layers, "hidden_size": data.integer("embedding_length"),
        "intermediate_size": data.integer("feed_forward_length"),
        "num_heads": data.integer("attention.head_count"), "in_channels": 3,
        "patch_size": data.integer("patch_size"), "temporal_patch_size": 2,
        "spatial_merge_size": data.integer("spatial_merge_size", 2),
        "out_hidden_size": data.integer("projection_dim"),
        "hidden_act": data.activation,
    }  # fmt: skip


def _vision_sizes(data: Metadata) -> Fields:
    return {
        "hidden_size": data.integer("embedding_length"),
        "intermediate_size": data.integer("feed_forward_length"),
        "num_hidden_layers": data.integer("block_count"),
        "num_attention_heads": data.integer("attention.head_count"),
        "image_size": data.integer("image_size"), "num_channels": 3,
        "patch_size": data.integer("patch_size"), "hidden_act": data.activation,
        "layer_norm_eps": data.number("attention.layer_norm_epsilon", 1e-6),
    }  # fmt: skip


def _gemma3_fields(data: Metadata, _shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    side = data.integer("image_size") // data.integer("patch_size")
    features = (side // data.integer("projector.scale_factor", 4)) ** 2
    return {"vision_config": _vision_sizes(data), "mm_tokens_per_image": features}


def _idefics3_fields(data: Metadata, _shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    scale = data.integer("projector.scale_factor")
    return {"vision_config": _vision_sizes(data), "scale_factor": scale}


def _pixtral_fields(data: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    is_silu = data.values.get(f"{KIND}.use_silu") is True
    theta = data.values.get(f"{KIND}.rope.freq_base", 10000.0)
    return {
        "vision_config": {
            **_vision_sizes(data), "hidden_act": "silu" if is_silu else "gelu",
            "rope_theta": theta,
        },
        "spatial_merge_size": data.integer("spatial_merge_size", 2),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": "mm.1.bias" in shapes,
    }  # fmt: skip


def _gemma4_fields(data: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    heads = data.integer("attention.head_count")
    rows = shapes.get("v.blk.0.attn_q.weight", (0,))[0]
    return {"vision_config": {
        "hidden_size": data.integer("embedding_length"),
        "intermediate_size": data.integer("feed_forward_length"),
        "num_hidden_layers": data.integer("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": max(1, rows // heads), "patch_size": data.integer("patch_size"),
        "hidden_activation": "gelu_pytorch_tanh",
        "pooling_kernel_size": data.integer("projector.scale_factor", 3),
        "position_embedding_size": shapes.get("v.position_embd.weight", (2, 1))[1],
        "rms_norm_eps": data.number("attention.layer_norm_epsilon", 1e-6),
        "use_clipped_linears": any(name.endswith(BOUNDS) for name in shapes),
        "standardize": "v.std_bias" in shapes,
    }}  # fmt: skip


def _paddle_fields(data: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    sizes = _vision_sizes(data)
    # Of an image are as many pixels as the file allows; the table is smaller.
    side = math.isqrt(shapes.get("v.position_embd.weight", (0,))[0])
    sizes["image_size"] = side * data.integer("patch_size")
    del sizes["layer_norm_eps"]  # a constant of the family
    merge = data.integer("spatial_merge_size", 2)
    return {"vision_config": {**sizes, "spatial_merge_size": merge}}


def _pixels(least: int, most: int, data: Metadata) -> Fields:
    return {
        "min_pixels": data.integer("image_min_pixels", least),
        "max_pixels": data.integer("image_max_pixels", most),
    }


def _square(data: Metadata) -> Fields:
    size = data.integer("image_size")
    return {"size": {"height": size, "width": size}}


def _longest(data: Metadata) -> Fields:
    return {"size": {"longest_edge": data.integer("image_size")}}


def _tiles(data: Metadata) -> Fields:
    size = data.integer("image_size")
    longest = data.integer("preproc_image_size", 4 * size)
    return {
        "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size},
    }  # fmt: skip


def _soft_tokens(_data: Metadata) -> Fields:
    return {}  # that of the published checkpoints; files do not state it


def _without_one(x: HostArray) -> HostArray:
    return wrap(widen(x).astype(np.float32) - np.float32(1))


TOWER, PROJECTION = "vision_tower.", "multi_modal_projector."
GEMMA_TOWER: Final = f"{TOWER}vision_model."
PROJECTORS: Final = {
    "qwen2.5vl_merger": Projector(
        "qwen2_5_vl", ("qwen2",), "<|image_pad|>", _qwen25_fields,
        partial(_pixels, 56 * 56, 28 * 28 * 16384), "visual.blocks.{}.",
        _qwen_layer({f"ffn_{name}": f"mlp.{name}_proj"
                     for name in ("gate", "up", "down")}),
        {"v.patch_embd": "visual.patch_embed.proj", "v.post_ln": "visual.merger.ln_q",
         "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"},
        frames=True,
    ),
    "qwen3vl_merger": Projector(
        "qwen3_vl", ("qwen3", "qwen3_5_text", "qwen3_5_moe_text"), "<|image_pad|>",
        _qwen3_fields, partial(_pixels, 1 << 16, 1 << 24), "visual.blocks.{}.",
        _qwen_layer({"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}),
        {"v.patch_embd": "visual.patch_embed.proj", "v.post_ln": "visual.merger.norm",
         "v.position_embd": "visual.pos_embed", "mm.0": "visual.merger.linear_fc1",
         "mm.2": "visual.merger.linear_fc2"},
        frames=True,
    ),
    "gemma3": Projector(
        "gemma3", ("gemma3_text",), "<image_soft_token>", _gemma3_fields, _square,
        f"{GEMMA_TOWER}encoder.layers.{{}}.", SIGLIP_LAYER,
        {**_siglip_names(GEMMA_TOWER),
         "mm.soft_emb_norm": f"{PROJECTION}mm_soft_emb_norm",
         "mm.input_projection.weight": f"{PROJECTION}mm_input_projection_weight"},
        {"mm.soft_emb_norm.weight": _without_one},
    ),
    "gemma4v": Projector(
        "gemma4", ("gemma4_text",), "<|image|>", _gemma4_fields, _soft_tokens,
        f"{TOWER}encoder.layers.{{}}.",
        {**{f"attn_{name}": f"self_attn.{name}_proj.linear" for name in "qkv"},
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "attn_out": "self_attn.o_proj.linear", "ln1": "input_layernorm",
         "attn_post_norm": "post_attention_layernorm",
         "ln2": "pre_feedforward_layernorm",
         "ffn_post_norm": "post_feedforward_layernorm",
         **{f"ffn_{name}": f"mlp.{name}_proj.linear"
            for name in ("gate", "up", "down")}},
        {"v.patch_embd": f"{TOWER}patch_embedder.input_proj",
         "v.position_embd.weight": f"{TOWER}patch_embedder.position_embedding_table",
         "v.std_bias": f"{TOWER}std_bias", "v.std_scale": f"{TOWER}std_scale",
         "mm.input_projection": "embed_vision.embedding_projection"},
        flat_patches=True,
    ),
    "paddleocr": Projector(
        "paddleocr_vl", ("paddleocr_vl_text",), "<|IMAGE_PLACEHOLDER|>",
        _paddle_fields, partial(_pixels, 384 * 384, 1536 * 1536),
        "visual.vision_model.encoder.layers.{}.", SIGLIP_LAYER,
        {**_siglip_names("visual.vision_model."), "mm.input_norm": "mlp_AR.pre_norm",
         "mm.1": "mlp_AR.linear_1", "mm.2": "mlp_AR.linear_2"},
    ),
    "idefics3": Projector(
        "idefics3", ("llama",), "<image>", _idefics3_fields, _tiles,
        "model.vision_model.encoder.layers.{}.", SIGLIP_LAYER,
        {**_siglip_names("model.vision_model."),
         "mm.model.fc": "model.connector.modality_projection.proj"},
    ),
    "pixtral": Projector(
        "mistral3", ("llama", "mistral", "ministral3"), "[IMG]", _pixtral_fields,
        _longest, f"{TOWER}transformer.layers.{{}}.", PIXTRAL_LAYER,
        {"v.patch_embd": f"{TOWER}patch_conv", "v.pre_ln": f"{TOWER}ln_pre",
         "mm.input_norm": f"{PROJECTION}norm",
         "mm.patch_merger": f"{PROJECTION}patch_merger.merging_layer",
         "mm.1": f"{PROJECTION}linear_1", "mm.2": f"{PROJECTION}linear_2"},
        is_permuted=True,
    ),
}  # fmt: skip
"""By ``clip.projector_type``."""


class ProjectorCheckpoint(AdaptedCheckpoint):
    """The vision encoder of a file, in the layout of the whole model.

    text: the language model beside it. Raises :class:`CheckpointError` for a file that
    is none, that is of another kind, or whose features have another width than the
    language model.
    """

    def __init__(self, path: Path, text: GgufCheckpoint) -> None:
        inner = GgufCheckpoint(path)
        try:
            data = Metadata(inner.fields, path)
            known = _projector(data, text)
            shapes = {name: inner.spec(name)[1] for name in inner.names()}
            fields = known.fields(data, shapes)
            token = list(vocabulary(text.fields, text.path)).index(known.token)
            config = {
                **fields, "model_type": known.model_type, "text_config": text.config,
                "image_token_id": token,
            }  # fmt: skip
            super().__init__(inner, _pieces(known, data, shapes), config=config)
            self._processor = known.processor(data) | {
                "image_mean": data.numbers("image_mean"),
                "image_std": data.numbers("image_std"),
            }
        except BaseException:
            inner.close()
            raise

    @property
    def image_processor(self) -> Mapping[str, Any]:
        return self._processor


def _projector(data: Metadata, text: GgufCheckpoint) -> Projector:
    """Return the conventions of a file, which must be of a language model."""
    if data.values.get("general.architecture") != KIND:
        raise CheckpointError(
            f"{data.where}: general.architecture: found "
            f"{show(data.values.get('general.architecture'))}; accepted: {KIND!r}, a "
            "vision encoder"
        )
    kind = data.values.get(
        f"{KIND}.vision.{PROJECTOR}", data.values.get(f"{KIND}.{PROJECTOR}")
    )
    known = PROJECTORS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise CheckpointError(
            f"{data.where}: {KIND}.{PROJECTOR}: found {show(kind)}; accepted: "
            f"{', '.join(PROJECTORS)}"
        )
    own, width = text.config["model_type"], data.integer("projection_dim")
    hidden = text.config.get("hidden_size")
    if own not in known.texts or width != hidden:
        raise CheckpointError(
            f"{data.where}: found features of {width} numbers for a model of kind "
            f"{' or '.join(known.texts)}; accepted: those of {text.path.name}, which "
            f"is of kind {own} with {hidden}"
        )
    if known.token not in vocabulary(text.fields, text.path):
        raise CheckpointError(
            f"{text.path}: tokenizer.ggml.tokens: found no {known.token}, the place of "
            "a feature"
        )
    if data.integer("block_count") > MAX_LAYERS:
        data.refuse("block_count", data.integer("block_count"), f"up to {MAX_LAYERS}")
    return known


def _pieces(
    known: Projector, data: Metadata, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Piece]:
    """Return the tensors of the whole model's layout, and what they are made of."""
    sources: dict[str, list[str]] = {}
    swapped = _is_swapped(shapes)
    tapped = [
        at
        for at, is_one in enumerate(
            data.flags("is_deepstack_layers", data.integer("block_count"))
        )
        if is_one
    ]
    for name in shapes:
        if UNUSED.fullmatch(name) or name == NEXT_FRAME:
            continue
        own = _name(known, name, swapped, tapped)
        if own is None:
            raise CheckpointError(
                f"{data.where}: tensor {name!r}: not known of {known.model_type}; "
                "accepted: those of llama.cpp's converter"
            )
        sources.setdefault(own, []).append(name)
    pieces = {}
    for own, names in sources.items():
        if len(names) > 1:
            names.sort(key=lambda name: "qkv".index(name.rpartition(".")[0][-1]))
        if names[0] == PATCH and known.frames:
            names = [PATCH, NEXT_FRAME]
        shape, make = _made(known, data, names, shapes)
        pieces[own] = Piece(tuple(names), shape, make)
    return pieces


def _name(
    known: Projector, name: str, swapped: bool, tapped: Sequence[int]
) -> str | None:
    """Return the name of a tensor in the whole model's layout."""
    if block := BLOCK.fullmatch(name):
        index, module, kind = block.groups()
        if swapped and module in ("ffn_up", "ffn_down"):
            module = "ffn_down" if module == "ffn_up" else "ffn_up"
        if module not in known.modules:
            return None
        own = known.modules[module]
        if kind in BOUNDS:
            own = own.removesuffix(".linear")
        return f"{known.layer.format(int(index))}{own}.{kind}"
    if (part := DEEPSTACK.fullmatch(name)) and int(part[1]) in tapped:
        at, module = tapped.index(int(part[1])), part[2]
        module = module if module == "norm" else f"linear_{module}"
        return f"visual.deepstack_merger_list.{at}.{module}.{part[3]}"
    if name in known.names:
        return known.names[name]
    stem, _, kind = name.rpartition(".")
    return f"{known.names[stem]}.{kind}" if stem in known.names else None


def _is_swapped(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the feed-forward layers have each other's names, as in old files."""
    up = shapes.get("v.blk.0.ffn_up.weight", ())
    norm = shapes.get("v.blk.0.ln1.weight", ())
    return len(up) == 2 and len(norm) == 1 and up[0] == norm[0] != up[1]


def _made(
    known: Projector, data: Metadata, names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[int, ...], Make | None]:  # fmt: skip
    """Return a tensor's shape, and the function that computes it from stored ones."""
    for name in names:
        if name not in shapes:
            raise CheckpointError(f"{data.where}: tensor {name!r}: not found")
    first = shapes[names[0]]
    if names[-1] == NEXT_FRAME:
        return (*first[:2], 2, *first[2:]), _frames
    if len(names) > 1:
        return (sum(shapes[name][0] for name in names), *first[1:]), _joined
    block = BLOCK.fullmatch(names[0])
    if known.is_permuted and block and block[2] in ("attn_q", "attn_k"):
        heads, where = data.integer("attention.head_count"), f"{data.where}: {names[0]}"
        return first, lambda stored: unpermute(stored[0], heads, where)
    if (change := known.changes.get(names[0])) is not None:
        return first, lambda stored: change(stored[0])
    if names[0] == PATCH and known.flat_patches:
        return (first[0], first[1] * first[2] * first[3]), _flat
    return first, None


def _frames(stored: Sequence[HostArray]) -> HostArray:
    data = np.stack([each.data for each in stored], axis=2)
    return replace(stored[0], data=data, shape=data.shape)


def _flat(stored: Sequence[HostArray]) -> HostArray:
    """Return a convolution [H, C, P, P] as a matrix [H, P * P * C]."""
    data = np.ascontiguousarray(stored[0].data.transpose(0, 2, 3, 1))
    data = data.reshape(len(data), -1)
    return replace(stored[0], data=data, shape=data.shape)


def _joined(stored: Sequence[HostArray]) -> HostArray:
    data = np.concatenate([each.data for each in stored])
    rows = sum(each.shape[0] for each in stored)
    return replace(stored[0], data=data, shape=(rows, *stored[0].shape[1:]))


def projectors_beside(path: Path) -> list[Path]:
    """Return the files beside a language model's that are called as encoders."""
    return sorted(
        each for each in path.parent.glob("*.gguf") if is_projector(each.name)
    )
