"""Encoding of images, and the first token after one, beside transformers.

    python bench/image_encoding.py [--shape qwen3-vl-8b] [--device cuda] [--pixels 1024]
        [--images 1,4,16] [--runs 5] [--peers inl,transformers,compiled]

A model of the shape of Qwen3-VL-8B with random weights in bfloat16 is written to a
folder, which both read. Prints, of images of --pixels by --pixels, the median
milliseconds for each of three stretches of work: "encoder", from patches on the host to
features; "whole", from images of Pillow to features; and "first token", from an image
of Pillow and 64 other tokens to one greedy token. "compiled" is transformers under
torch.compile. Attention of transformers is flash_attention_2 where flash-attn is
installed, else sdpa. Last is how far the features of both are from each other.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from inl import EngineConfig, InferenceEngine
from inl.dtypes import widen
from inl.executor.model_loader import open_model
from inl.spec.embedded_rows import as_array

PLACE, VIDEO, START, END = 5, 6, 7, 8
"""Tokens at the place of a feature and around an image."""
ROPE = {
    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-8b": (
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": ROPE,
        },
        {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
            "num_heads": 16, "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "tiny": (
        {
            "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 128, "rope_parameters": ROPE,
        },
        {
            "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
            "out_hidden_size": 256, "deepstack_visual_indexes": [0, 1],
        },
    ),
}  # fmt: skip
"""Fields of the language model and of the vision encoder."""


def write_model(shape: str, device: str, folder: Path) -> None:
    """Write the files of a model with random weights, made on a device of torch."""
    import torch
    import transformers

    text, vision = SHAPES[shape]
    config = transformers.Qwen3VLConfig(
        text_config={
            **text, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        },
        vision_config={
            **vision, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "num_position_embeddings": 2304,
        },
        image_token_id=PLACE, video_token_id=VIDEO, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            made = transformers.Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    made.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def pictures(pixels: int, count: int, rng: np.random.Generator) -> list[Any]:
    """Return images of random pixels, which no cache has seen."""
    from PIL import Image

    shape = pixels, pixels, 3
    return [
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)) for _ in range(count)
    ]


def prompt(features: int, images: int) -> list[int]:
    """Return 64 token ids, and the placeholders of images."""
    return [*range(20, 84), *([START] + [PLACE] * features + [END]) * images]


def timed(run: Callable[[Any], Any], given: list[Any]) -> float:
    """Return the median milliseconds of a function of inputs; the first warms up."""
    run(given[0])
    found = []
    for each in given[1:]:
        start = time.perf_counter()
        run(each)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


class Inl:
    """An engine on the files."""

    name = "inl"

    def __init__(self, folder: Path, device: str) -> None:
        config = EngineConfig(
            backend=device, dtype="bfloat16", context=20480, max_batch=4
        )
        self._engine = InferenceEngine(open_model(folder), config=config)
        self._images = self._engine._encoder.images
        self.settings = self._images._vision.settings

    def patches(self, images: list[Any]) -> Any:
        """Return the patches and digests of images."""
        decoder = self._images._decoder
        decoded = [decoder.decode(image, "image") for image in images]
        return [
            (self.settings.patches(each.pixels, "image"), each.digest)
            for each in decoded
        ]

    def encode(self, patches: Any) -> Any:
        """Return features of patches on the host."""
        batch = self._engine_encoder.begin(patches)
        batch.encoding.advance(batch.encoding.parts)
        return [widen(as_array(each.features)) for each in batch.results()]

    @property
    def _engine_encoder(self) -> Any:
        return self._images._loaded()

    def whole(self, images: list[Any]) -> Any:
        """Encode images of Pillow as a request of them does."""
        rows, columns = self.settings.grid_of(*images[0].size[::-1], "image")
        return self._images.embeddings(prompt(rows * columns // 4, len(images)), images)

    def first_token(self, images: list[Any]) -> Any:
        """Generate one token after images of Pillow."""
        rows, columns = self.settings.grid_of(*images[0].size[::-1], "image")
        ids = prompt(rows * columns // 4, len(images))
        return self._engine.generate(ids, images=images, max_tokens=1, ignore_eos=True)

    def close(self) -> None:
        """Free the device's memory."""
        self._engine.close()


class Transformers:
    """The model of transformers on the files."""

    name = "transformers"

    def __init__(self, folder: Path, device: str, *, compiled: bool = False) -> None:
        import torch
        import transformers

        attention = "flash_attention_2" if find_spec("flash_attn") else "sdpa"
        self._torch, self._device = torch, device
        self._model = (
            transformers.Qwen3VLForConditionalGeneration.from_pretrained(
                folder, dtype=torch.bfloat16, attn_implementation=attention
            )
            .to(device)
            .eval()
        )
        self._processor = transformers.AutoImageProcessor.from_pretrained(folder)
        self.name = f"transformers {transformers.__version__} ({attention}"
        self.name += ", compiled)" if compiled else ")"
        if compiled:
            visual = self._model.model.visual
            visual.forward = torch.compile(visual.forward, dynamic=False)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        with self._torch.inference_mode():
            yield
            if self._device.startswith("cuda"):
                self._torch.cuda.synchronize()

    def _features(self, pixels: Any, grid: Any) -> Any:
        found = self._model.model.get_image_features(
            pixels.to(self._device), grid.to(self._device)
        )
        first = getattr(found, "pooler_output", None)
        parts = found[0] if first is None else first
        return [part.float().cpu().numpy() for part in parts]

    def encode(self, patches: Any) -> Any:
        """Return features of patches on the host."""
        torch = self._torch
        values = np.concatenate([each.values for each, _ in patches])
        grid = torch.tensor([[1, *each.grid] for each, _ in patches])
        with self._inference():
            pixels = torch.from_numpy(values).to(torch.bfloat16)
            return self._features(pixels, grid)

    def _processed(self, images: list[Any]) -> Any:
        return self._processor(images=images, return_tensors="pt")

    def whole(self, images: list[Any]) -> Any:
        """Encode images of Pillow."""
        given = self._processed(images)
        with self._inference():
            pixels = given["pixel_values"].to(self._torch.bfloat16)
            return self._features(pixels, given["image_grid_thw"])

    def first_token(self, images: list[Any]) -> Any:
        """Generate one token after images of Pillow."""
        torch, given = self._torch, self._processed(images)
        features = int(given["image_grid_thw"][0].prod()) // 4
        ids = torch.tensor([prompt(features, len(images))], device=self._device)
        more = {}
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:
            more["mm_token_type_ids"] = (ids == PLACE).int()
        with self._inference():
            return self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **more,
                pixel_values=given["pixel_values"].to(self._device, torch.bfloat16),
                image_grid_thw=given["image_grid_thw"].to(self._device),
                max_new_tokens=1, do_sample=False,
            )  # fmt: skip

    def close(self) -> None:
        """Free the device's memory."""
        del self._model
        gc.collect()
        if self._device.startswith("cuda"):
            self._torch.cuda.empty_cache()


def report(peer: Any, inl: Any, options: Any, rng: np.random.Generator) -> None:
    """Print the rows of one engine. inl: what makes the patches."""

    def fresh(count: int) -> list[Any]:
        return [pictures(options.pixels, count, rng) for _ in range(options.runs + 1)]

    for count in options.images:
        given = [inl(images) for images in fresh(count)]
        encoder = timed(peer.encode, given)
        whole = timed(peer.whole, fresh(count))
        print(
            f"{peer.name}: {count} images: encoder {encoder / count:.2f} ms an image, "
            f"{1e3 * count / encoder:.1f} images/s; whole {whole / count:.2f} ms an "
            f"image, {1e3 * count / whole:.1f} images/s",
            flush=True,
        )
    token = timed(peer.first_token, fresh(1))
    print(f"{peer.name}: first token with one image {token:.1f} ms", flush=True)


def distance(first: list[Any], second: list[Any]) -> float:
    """Return the largest distance of rows, by their length."""
    a, b = np.concatenate(first), np.concatenate(second)
    gaps = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    return float(gaps.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--images", default="1,4,16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", default="inl,transformers,compiled")
    parser.add_argument("--folder", type=Path, help="keeps the model's files")
    options = parser.parse_args()
    options.images = [int(each) for each in options.images.split(",")]
    peers = options.peers.split(",")
    rng = np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "config.json").exists():
            write_model(options.shape, options.device, folder)
        engine = Inl(folder, options.device)
        sample = engine.patches(pictures(options.pixels, 2, rng))
        found = engine.encode(sample)
        if "inl" in peers:
            report(engine, engine.patches, options, rng)
        maker = engine.patches
        engine.close()
        for name in peers:
            if name == "inl":
                continue
            peer = Transformers(folder, options.device, compiled=name == "compiled")
            apart = distance(found, peer.encode(sample))
            print(f"{peer.name}: features at most {apart:.2%} apart", flush=True)
            report(peer, maker, options, rng)
            peer.close()


if __name__ == "__main__":
    main()
