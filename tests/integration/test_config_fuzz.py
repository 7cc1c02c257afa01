"""Drawn configs mean what they mean to transformers, or are refused by field.

INL_CONFIG_SEED draws other configs than those of every run.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from depth import scaled
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import wrap
from inl.errors import InlError
from inl.executor.model_loader import read_model
from inl.models.registry import find_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

families = importlib.import_module("families")
draws = importlib.import_module("config_draws")
BOUND = 1e-4
SEED = int(os.environ.get("INL_CONFIG_SEED", "0"))
DRAWS = scaled(2, 25)
"""Configs of each family."""


class Memory(Checkpoint):
    """A checkpoint of tensors in memory."""

    eos_token_ids = ()
    chat_template = None

    def __init__(self, config, tensors):
        self.path, self.config, self.tensors = Path("memory"), config, tensors

    def names(self):
        return list(self.tensors)

    def spec(self, name):
        return "float32", self.tensors[name].shape

    def tensor(self, name):
        return wrap(self.tensors[name])

    def tokenizer(self):
        raise NotImplementedError

    def close(self):
        pass


def expected(config, seed):
    """Tensors of a model of transformers, tokens within our context, their logits."""
    hf = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(
        copy.deepcopy(config)
    )
    hf._attn_implementation = "eager"
    hf.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(hf).eval()
    source = torch.Generator().manual_seed(seed)
    centered = "Gemma" if "gemma" in config["model_type"] else ""
    with torch.no_grad():
        for key, weight in families.tensors(model):
            weight.copy_(families._random(key, weight.shape, source, centered=centered))
        ids = torch.randint(3, draws.VOCAB, (1, draws.TOKENS), generator=source)
        ids = ids[:, : context(config)]
        logits = model(ids).logits[0].numpy()
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        tensors.pop("lm_head.weight", None)
    return tensors, ids[0].tolist(), logits


def context(config):
    """Our context length; any number if we refuse the config."""
    try:
        return find_model(config, Path("memory")).config(config).max_tokens
    except InlError:
        return 1


def found(config, tensors, ids):
    language = read_model(Memory(config, tensors))
    runner = families.load(language, families.reference(), "float64")
    return families.logits(runner, ids)


def outcome(config, seed):
    """Compare one config; returns what happened."""
    try:
        tensors, ids, logits = expected(config, seed)
    except Exception:  # transformers refuses the config, or fails
        tensors = None
    try:
        if tensors is None:
            find_model(config, Path("memory")).config(config)
        else:
            distance = families.distance(found(config, tensors, ids), logits)
    except InlError as error:
        if tensors is None:
            return "refused by both"
        if "config field" not in str(error):
            raise
        return "refused"
    if tensors is None:
        return "refused by transformers"
    assert np.isfinite(logits).all()
    # Norms follow the recurrence, and scale the rounding of its float32 results.
    assert distance < BOUND * (5 if "linear_key_head_dim" in config else 1), distance
    return "equal"


@pytest.mark.scaled
@pytest.mark.parametrize("family", draws.FAMILIES)
def test_drawn_configs(family, caplog):
    transformers.logging.set_verbosity_error()
    outcomes = Counter()
    for number in range(DRAWS):
        seed = SEED * 10_000 + number
        config = draws.draw(random.Random(f"{family}/{seed}"), family)
        try:
            outcomes[outcome(config, seed)] += 1
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}\n{json.dumps(config)}")
    print(f"{family}, INL_CONFIG_SEED={SEED}: {dict(outcomes)}")
    assert DRAWS < 20 or outcomes["equal"] > DRAWS / 10, outcomes
