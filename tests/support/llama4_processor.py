"""The image processor of Llama 4 in transformers, also without torchvision.

transformers has it on torchvision alone, of which it uses three functions: without the
package, their stand-ins call torch, as torchvision does.
"""

from __future__ import annotations

import enum
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import SizeDict

MODULE = "transformers.models.llama4.image_processing_llama4"
NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def _module():
    if find_spec("torchvision"):
        return import_module(MODULE)
    stubs = {name: ModuleType(name) for name in NAMES}
    functional = SimpleNamespace(
        InterpolationMode=enum.Enum("InterpolationMode", "BILINEAR"),
        pad=lambda image, padding, fill: torch.nn.functional.pad(
            image, (padding[0], padding[2], padding[1], padding[3])
        ),
    )
    stubs["torchvision.transforms.v2"].functional = functional
    sys.modules |= stubs
    try:
        return import_module(MODULE)
    finally:
        for name in NAMES:
            del sys.modules[name]


class _Functions:
    """What the class has of its base."""

    @staticmethod
    def resize(images, size, resample):
        assert resample == 2, "bilinear"
        size = int(size.height), int(size.width)
        return torch.nn.functional.interpolate(
            images, size=size, mode="bilinear", antialias=True
        )

    @staticmethod
    def normalize(images, mean, std):
        mean, std = (
            torch.tensor(each, dtype=images.dtype).view(-1, 1, 1)
            for each in (mean, std)
        )
        return images.sub(mean).div(std)


class Llama4Processor:
    """Tiles of ``side`` pixels, and their pixel values of an image of Pillow."""

    def __init__(self, side, tiles):
        self._class = _module().Llama4ImageProcessor
        self._side, self._tiles = side, tiles

    def __call__(self, image):
        """Return pixel values [tiles, 3, side, side], and the rows and columns."""
        own = self._class
        given = _Functions()
        given.rescale_and_normalize = own.rescale_and_normalize.__get__(given)
        pixels = np.array(convert_to_rgb(image)).transpose(2, 0, 1)
        found = own._preprocess(
            given, [torch.from_numpy(pixels.copy())], do_resize=True, do_rescale=True,
            size=SizeDict(height=self._side, width=self._side), resample=2,
            rescale_factor=1 / 255, do_normalize=True, image_mean=[0.5] * 3,
            image_std=[0.5] * 3, max_patches=self._tiles, resize_to_max_canvas=False,
            disable_grouping=None, return_tensors="pt",
        )  # fmt: skip
        return found["pixel_values"].float(), found["aspect_ratios"][0].tolist()

    @property
    def fields(self):
        """``preprocessor_config.json``."""
        side = self._side
        return {
            "size": {"height": side, "width": side}, "max_patches": self._tiles,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2,
            "rescale_factor": 1 / 255, "resize_to_max_canvas": False,
        }  # fmt: skip
