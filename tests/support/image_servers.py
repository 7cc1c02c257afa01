"""Servers of tiny models of images and text, and images as clients send them."""

from __future__ import annotations

import base64
import io

from http_servers import HashServer
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server


class ImageServer(HashServer):
    """A server of a model of images and text in a folder."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def make(self):
        # Front-ends read the model's tokenizer and processor.
        sources = [ModelSource("hash", self._open, place=str(self.folder))]
        return Server(sources, self.config, max_batch=self._max_batch)

    def _open(self, on_step):
        return opened(self.folder, on_step=on_step)

    def post(self, path, **body):
        status, _, answer = self.send("POST", path, body)
        return status, answer


def opened(folder, **options):
    """An engine of the model."""
    config = EngineConfig(backend="cpu", dtype="float32")
    return InferenceEngine(open_model(folder), config=config, **options)


def png(image):
    """The bytes of an image's file."""
    data = io.BytesIO()
    image.save(data, "png")
    return data.getvalue()


def encoded(image):
    """An image's file in base64."""
    return base64.b64encode(png(image)).decode()


def uri(image):
    """An image as a data URI."""
    return f"data:image/png;base64,{encoded(image)}"
