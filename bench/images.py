"""Images beside decoding: time between the steps of an answer while they are encoded.

    python bench/images.py [--device cpu] [--dtype bfloat16] [--pixels 512] [--images 2]

A model of the shape of SmolVLM-256M with random weights (--shape qwen3-vl-2b for
another) answers one request. Meanwhile images of --pixels by --pixels are encoded: in
turns of some layers, as the engine does, and, for comparison, all layers of an image in
one turn. Prints the time between two steps (median and longest) alone and in both ways,
and the time of the images. Needs transformers, tokenizers and Pillow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from inl import EngineConfig, InferenceEngine
from inl.engine import image_queue
from inl.executor.model_loader import open_model

PLACE = 5
"""Token at the place of a feature."""


def smolvlm() -> Any:
    """Return a model of the shape of SmolVLM-256M, whose images are squares of 512."""
    import transformers

    return transformers.SmolVLMForConditionalGeneration(
        transformers.SmolVLMConfig(
            text_config={
                "model_type": "llama", "vocab_size": 49280, "hidden_size": 576,
                "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
                "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            },
            vision_config={
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
            },
            image_token_id=PLACE, scale_factor=4, tie_word_embeddings=False,
            pad_token_id=2,
        )
    )  # fmt: skip


def qwen3_vl() -> Any:
    """Return a model of the shape of Qwen3-VL-2B."""
    import transformers

    rope = {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(
            text_config={
                "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "num_hidden_layers": 28, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": rope,
                "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            },
            vision_config={
                "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
                "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2,
                "temporal_patch_size": 2, "out_hidden_size": 2048,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [5, 11, 17],
            },
            image_token_id=PLACE, video_token_id=6, vision_start_token_id=7,
            vision_end_token_id=8, tie_word_embeddings=True,
        )
    )  # fmt: skip


SHAPES = {
    "smolvlm-256m": (smolvlm, {
        "size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512},
    }),
    "qwen3-vl-2b": (qwen3_vl, {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }),
}  # fmt: skip


def write_model(shape: str, folder: Path) -> None:
    """Write the files of a model with random weights in bfloat16."""
    import torch

    torch.manual_seed(1)
    made, processor = SHAPES[shape]
    made().to(torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


class Steps:
    """When the steps of an engine ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, _record: Any) -> None:
        self.times.append(time.perf_counter())

    def gaps(self, start: float, stop: float) -> list[float]:
        """Return the milliseconds between steps from ``start`` to ``stop``."""
        times = [each for each in self.times if start <= each <= stop]
        times = [start, *times, stop] if times else [start, stop]
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def picture(pixels: int, seed: int) -> Any:
    """Return an image of random pixels."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (pixels, pixels, 3), np.uint8))


def measure(
    engine: InferenceEngine, steps: Steps, images: list[Any]
) -> tuple[list[float], float]:
    """Encode images beside an answer; return the gaps in it, and the seconds."""
    answer = engine.submit(list(range(20, 84)), max_tokens=4000, ignore_eos=True)
    thread = threading.Thread(target=answer.result)
    thread.start()
    prompts = engine._encoder.images
    size = prompts._vision.settings.grid_of(images[0].height, images[0].width, "image")
    ids = [9, *prompts_ids(prompts, size) * len(images)]
    start = time.perf_counter()
    prompts.embeddings(ids, images)
    stop = time.perf_counter()
    answer.cancel()
    thread.join()
    return steps.gaps(start, stop), stop - start


def prompts_ids(prompts: Any, grid: tuple[int, int]) -> list[int]:
    """Return the placeholders of an image, and a token between its parts."""
    pieces = prompts._vision.settings.pieces(grid)
    return [
        token
        for each in pieces
        for token in ([PLACE] * each if isinstance(each, int) else [9])
    ] + [9]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--images", type=int, default=2)
    options = parser.parse_args()
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        write_model(options.shape, Path(folder))
        config = EngineConfig(
            backend=options.device, dtype=options.dtype, context=8192, max_batch=4
        )
        with InferenceEngine(
            open_model(folder), config=config, on_step=steps
        ) as engine:
            report(engine, steps, options)


def report(engine: InferenceEngine, steps: Steps, options: Any) -> None:
    """Print the gaps between steps alone, and in both ways of encoding."""
    engine.generate(list(range(20, 84)), max_tokens=64, ignore_eos=True)
    start = steps.times[-48]
    show("alone", steps.gaps(start, steps.times[-1]), None)
    least, most = image_queue.LEAST_SECONDS, image_queue.MOST_SECONDS
    ways = {"layers in turns": (least, most), "an image in a turn": (1e9, 1e9)}
    for seed, (name, bounds) in enumerate(ways.items()):
        image_queue.LEAST_SECONDS, image_queue.MOST_SECONDS = bounds  # type: ignore[misc] # Final
        for warm in (True, False):  # programs are compiled in the first
            count = 1 if warm else options.images
            images = [
                picture(options.pixels, 100 * seed + 10 * warm + number)
                for number in range(count)
            ]
            gaps, seconds = measure(engine, steps, images)
        show(name, gaps, seconds / options.images)


def show(name: str, gaps: list[float], seconds: float | None) -> None:
    """Print a row."""
    encoded = "" if seconds is None else f"; {seconds:.2f} s an image"
    print(
        f"{name}: {statistics.median(gaps):.1f} ms between steps, "
        f"{max(gaps):.1f} longest{encoded}",
        flush=True,
    )


if __name__ == "__main__":
    main()
