"""Servers of a tiny BERT whose words are its token ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tokenizers

from http_servers import HashServer
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models import bert
from inl.spec.encoder import Labels
from inl.testing.tiny import MemoryCheckpoint
from inl.testing.tiny_encoder import plain_encoding, tiny_bert
from inl.text.tokenizer import Tokenizer


def word_tokenizer():
    """A word for each id, between [CLS] and [SEP]."""
    words = ["[CLS]", "[SEP]", *(f"w{n}" for n in range(94))]
    vocab = {word: index for index, word in enumerate(words)}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "w0"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 1), ("[CLS]", 0)
    )
    return Tokenizer(rules)


class EncoderServer(HashServer):
    """A server of a tiny BERT on the reference backend; labels: of its head."""

    def __init__(self, labels=0, **settings):
        super().__init__(**settings)
        self.hf, self.tensors = tiny_bert(np.random.default_rng(8), labels)
        self.labels = labels

    def _open(self, on_step):
        config = bert.MODEL.config(self.hf)
        if self.labels:
            names = tuple(f"kind {number}" for number in range(self.labels))
            usual = "sigmoid" if self.labels == 1 else "softmax"
            config = replace(config, labels=Labels(names, usual))
        checkpoint = MemoryCheckpoint(self.hf, self.tensors)
        model = LanguageModel(bert.MODEL, config, checkpoint)
        options = EngineConfig(backend="reference", dtype="float32")
        self.engine = InferenceEngine(model, word_tokenizer(), options, on_step=on_step)
        return self.engine

    def post(self, path, **body):
        status, _, answer = self.send("POST", path, body)
        return status, answer

    def row(self, *ids):
        return plain_encoding(self.hf, self.tensors, ids, "mean", unit=True)
