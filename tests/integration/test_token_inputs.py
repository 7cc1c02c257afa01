"""Models of images and text, given the inputs of their tokens, against transformers.

Embeddings in place of tokens, positions along three axes, features after layers, and
spans that attend to themselves, on each backend. Images are random rows.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from inl.config import EngineConfig
from inl.device import Device
from inl.dtypes import widen
from inl.executor.model_loader import open_model
from inl.runners.local_runner import start_runner
from inl.spec.embedded_rows import token_inputs, with_inputs
from inl.testing.play import admission, one_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
families = importlib.import_module("families")

BOUND = 1e-4
TEXT, IMAGE, MORE = 7, 12, 5
TOKENS = TEXT + IMAGE + MORE
AT = range(TEXT, TEXT + IMAGE)
"""Tokens of the image."""
VISION = {
    "hidden_size": 8, "embed_dim": 8, "intermediate_size": 8, "depth": 1,
    "num_heads": 2, "patch_size": 2, "out_hidden_size": 48,
    "num_position_embeddings": 16,
}  # fmt: skip
DEEPSTACK = {"deepstack_visual_indexes": [0, 0]}
SECTIONS = families.rope(mrope_section=[2, 1, 1])
INTERLEAVED = families.rope(mrope_section=[2, 1, 1], mrope_interleaved=True)
QWEN = {
    "Qwen2VL": SECTIONS,
    "Qwen2_5_VL": SECTIONS,
    "Qwen3VL": INTERLEAVED | {"head_dim": 8},
}
BACKENDS = ["reference", "cpu", "torch", "jax"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    name = request.param
    if name == "cpu":
        return importlib.import_module("inl_cpu.backend").open_cpu(Device("cpu:0"))
    if name == "torch":
        module = importlib.import_module("inl_cpu.torch_backend")
        return module.TorchCpuBackend(Device("cpu:0"))
    if name == "jax":
        pytest.importorskip("jax")
        monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
        backends = pytest.importorskip("inl_tpu.backend")
        return backends.TpuBackend(Device("tpu:0"))
    return families.reference("float32")


def filled(model, path, *, centered=""):
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(families._random(key, weight.shape, source, centered=centered))
    model.eval().save_pretrained(path)
    ids = torch.randint(3, families.VOCAB, (1, TOKENS + 3), generator=source)
    rows = torch.randn((IMAGE, families.SIZES["hidden_size"]), generator=source)
    return ids, rows, source


def start(path, backend):
    config = EngineConfig(
        dtype="float32", context=48, max_batch=2, token_budget=32, sampling="greedy",
        backend=str(backend.device),
    )  # fmt: skip
    return start_runner(open_model(path), backend, config)


def computed(runner, ids, inputs_of, *, steps=3):
    """Logits after the prompt, and after each of some further tokens."""
    limits = runner.limits
    runner.submit(admission(limits, 1, range(1, 1 + 48 // limits.block_size)))
    found, at = [], 0
    for number, count in enumerate((TOKENS, *[1] * steps)):
        part = ids[0, at : at + count].tolist()
        decoding = int(number > 0)
        frame = one_step(limits, [(1, part)], step=number, decoding=decoding)
        given = inputs_of(at, at + count)
        if given is not None:
            frame = with_inputs(frame, given, limits)
        found.append(widen(runner.logits(frame))[0])
        at += count
    return np.stack(found)


def image_rows(rows, start, stop, first=0):
    return {at - first: rows[at - TEXT].numpy() for at in AT if start <= at < stop}


def places():
    """Positions along three axes: the image is 3 x 4, and the text goes on after it."""
    found = np.tile(np.arange(TOKENS + 3), (3, 1))
    height, width = np.divmod(np.arange(IMAGE), 4)
    found[:, TEXT : TEXT + IMAGE] = TEXT + np.stack([0 * height, height, width])
    found[:, TEXT + IMAGE :] += 4 - IMAGE
    return found


@pytest.mark.parametrize("kind", QWEN)
def test_positions_along_axes(kind, backend, tmp_path):
    layers = 2 if kind == "Qwen3VL" else 0
    config = getattr(transformers, f"{kind}Config")(
        text_config=families.SIZES | QWEN[kind],
        vision_config=VISION | (DEEPSTACK if layers else {}),
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    ids, rows, source = filled(model, tmp_path)
    position = places()
    features = torch.randn((layers, IMAGE, rows.shape[1]), generator=source)
    mask = torch.zeros(1, TOKENS + 3, dtype=torch.bool)
    mask[:, TEXT : TEXT + IMAGE] = True
    text = model.model.language_model
    embedded = text.embed_tokens(ids).detach().clone()
    embedded[mask] = rows
    more = {}
    if layers:
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(features)}
    with torch.no_grad():
        hidden = text(
            inputs_embeds=embedded, position_ids=torch.tensor(position)[:, None], **more
        ).last_hidden_state
        expected = model.lm_head(hidden)[0, TOKENS - 1 :].numpy()
    runner = start(tmp_path, backend)
    limits = runner.limits
    assert limits.axes == 3
    assert limits.feature_layers == tuple(range(layers))

    def inputs(start, stop, *, turned=True, added=True):
        rows_at = image_rows(rows, start, stop, start)
        offsets = {
            at - start: position[:, at] - at for at in range(start, stop) if turned
        }
        given = {at: features[:, at + start - TEXT].numpy() for at in rows_at if added}
        return token_inputs(limits, rows_at, given, offsets)

    found = computed(runner, ids, inputs)
    assert families.distance(found, expected) < BOUND
    if layers:
        found = computed(runner, ids, lambda a, b: inputs(a, b, added=False))
        assert families.distance(found, expected) > 10 * BOUND
    found = computed(
        runner, ids, lambda a, b: inputs(a, b, turned=False) if a == 0 else None
    )
    assert families.distance(found, expected) > 10 * BOUND
    runner.close()


def test_spans_attend_to_themselves(backend, tmp_path):
    text = families.SIZES | families.GEMMA | {"layer_types": families.KINDS}
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config)
    ids, rows, _ = filled(model, tmp_path, centered="Gemma")
    kinds = torch.zeros_like(ids)
    kinds[:, TEXT : TEXT + IMAGE] = 1
    language = model.model.language_model
    embedded = language.embed_tokens(ids).detach().clone()
    scale = float(language.embed_tokens.embed_scale)
    embedded[kinds == 1] = rows * scale
    with torch.no_grad():
        out = model(inputs_embeds=embedded, token_type_ids=kinds)
        expected = out.logits[0, TOKENS - 1 :].numpy()
    runner = start(tmp_path, backend)
    limits = runner.limits
    assert limits.spans

    def inputs(start, stop, *, span=(TEXT, TEXT + IMAGE)):
        found = image_rows(rows, start, stop, start)
        spans = dict.fromkeys(found, span) if span else {}
        return token_inputs(limits, found, spans=spans) if found else None

    found = computed(runner, ids, inputs)
    assert families.distance(found, expected) < BOUND
    found = computed(runner, ids, lambda a, b: inputs(a, b, span=None))
    assert families.distance(found, expected) > 10 * BOUND
    runner.close()
