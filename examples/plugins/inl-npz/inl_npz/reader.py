"""Reads a model from an ``.npz`` file, with its config and tokenizer beside it."""

import numpy as np

from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.json_text import read_json
from inl.checkpoints.files.tokenizer_settings import TokenizerSettings
from inl.dtypes import wrap


class NpzCheckpoint(Checkpoint):
    """Arrays by the names of their tensors in the Hugging Face layout."""

    def __init__(self, path):
        self.path = path
        self.config = read_json(path.parent / "config.json", path.parent)
        ends = self.config.get("eos_token_id") or []
        self.eos_token_ids = tuple(ends if isinstance(ends, list) else [ends])
        self._settings = TokenizerSettings(path.parent)
        self._arrays = np.load(path, allow_pickle=False)

    def names(self):
        return list(self._arrays.files)

    def spec(self, name):
        if name not in self._arrays.files:
            raise self.missing(name)
        with self._arrays.zip.open(f"{name}.npy") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return dtype.name, shape

    def tensor(self, name):
        self.spec(name)
        return wrap(self._arrays[name])

    def files(self):
        return (self.path,)

    def tokenizer(self):
        return self._settings.tokenizer(self.config.get("model_type"))

    @property
    def chat_template(self):
        return self._settings.chat_template()

    def close(self):
        self._arrays.close()
