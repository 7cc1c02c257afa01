"""DirectML's programs on the CPU provider: the oracle, the checks, all providers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import default_model
from inl.device import Device
from inl.errors import BackendUnavailable
from inl.executor.model_loader import open_model
from inl.runners.local_runner import start_runner
from inl.testing.near_tie import compare
from inl.testing.oracle import prompt_logits
from inl_directml import providers
from inl_directml.backend import DirectmlBackend

TOKENS = 12
ORACLE = Path(__file__).parents[2] / "data" / "smollm2-oracle.json"


@pytest.fixture(scope="module")
def cases():
    return json.loads(ORACLE.read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INL_DIRECTML_PROVIDER", "cpu")
        backend = DirectmlBackend(Device("directml:0"))
    language = open_model(default_model())
    config = EngineConfig(dtype="float32", max_batch=9, context=128, sampling="greedy")
    runner = start_runner(language, backend, config)
    with InferenceEngine(language, config=config, runner=runner) as engine:
        yield engine


@pytest.mark.full
def test_the_default_model_follows_the_oracle(engine, cases, capsys):
    """One answer alone, streamed; then nine in a batch."""
    prompts = [case["prompt_ids"] for case in cases]
    text = "".join(engine.stream(prompts[7], max_tokens=TOKENS))
    answers = engine.generate(prompts, max_tokens=TOKENS)
    assert text
    assert cases[7]["text"].startswith(text)
    compared = [
        compare(answer.token_ids, case["token_ids"][:TOKENS], case["margins"])
        for answer, case in zip(answers, cases, strict=True)
    ]
    with capsys.disabled():
        print(f"\n{[c for c in compared if c.gap]} leave the oracle")
    assert all(each.allowed("float32") for each in compared)


@pytest.mark.full
def test_the_first_logits_are_the_oracles(engine, cases):
    for case in cases:
        logits = prompt_logits(engine.runner, case["prompt_ids"])
        top = np.argsort(-logits)[:10]
        assert list(top) == case["top10_ids"]
        assert np.abs(logits[top] - case["top10_logits"]).max() <= 1e-3


@pytest.mark.long
def test_every_promise_is_kept():
    more = {"INL_PLUGINS": "inl_directml.plugin", "INL_DIRECTML_PROVIDER": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "inl", "check", "directml:0"],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passes all" in done.stdout


def test_the_order_of_dtypes_follows_the_provider():
    assert DirectmlBackend(Device("directml:0")).traits.dtypes[0] == "float32"
    with pytest.raises(BackendUnavailable, match=r"directml:1: .* there is one CPU"):
        DirectmlBackend(Device("directml:1"))


def test_a_runtime_without_directml_is_refused(monkeypatch):
    monkeypatch.delenv("INL_DIRECTML_PROVIDER")
    with pytest.raises(
        BackendUnavailable, match=r"lacks DirectML; try: .*pip .*\[dml\]"
    ):
        DirectmlBackend(Device("directml:0"))


def test_a_device_that_opens_no_session_is_refused(monkeypatch):
    def configure(_):
        raise RuntimeError("no adapter\nat device.cpp")

    opened = providers.Provider("webgpu", configure, "webgpu")
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", "webgpu")
    monkeypatch.setitem(providers.OPEN, "webgpu", lambda _: opened)
    with pytest.raises(BackendUnavailable, match="provider webgpu: no adapter; try: "):
        DirectmlBackend(Device("directml:0"))


def test_directml_gets_the_device_and_the_options_that_it_needs(monkeypatch):
    name = "DmlExecutionProvider"
    monkeypatch.setattr(ort, "get_available_providers", lambda: [name])
    opened = providers.open_provider("dml", Device("directml:2"))
    options = ort.SessionOptions()
    assert opened.configure(options) == [(name, {"device_id": "2"}), providers.CPU]
    assert not options.enable_mem_pattern
    assert (opened.memory, opened.number, opened.in_place) == ("dml", 2, False)


def test_windows_ml_registers_what_its_catalog_lists(monkeypatch):
    made, added = [], []
    ready = SimpleNamespace(get=lambda: made.append("ready"))
    listed = SimpleNamespace(
        name="VendorEp", library_path="ep.dll", ensure_ready_async=lambda: ready
    )
    catalog = SimpleNamespace(find_all_providers=lambda: [listed])
    module = SimpleNamespace(
        machinelearning=SimpleNamespace(
            ExecutionProviderCatalog=SimpleNamespace(get_default=lambda: catalog)
        )
    )
    monkeypatch.setitem(sys.modules, "winui3.microsoft.windows.ai", module)
    monkeypatch.setattr(providers, "_REGISTERED", set())
    kinds = ort.OrtHardwareDeviceType
    devices = [
        SimpleNamespace(device=SimpleNamespace(type=kind))
        for kind in (kinds.CPU, kinds.NPU)
    ]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    monkeypatch.setattr(
        ort, "register_execution_provider_library", lambda *a: made.append(a)
    )
    opened = providers.open_provider("winml", Device("directml:0"))
    assert made == ["ready", ("VendorEp", "ep.dll")]
    options = SimpleNamespace(add_provider_for_devices=lambda *a: added.append(a))
    assert opened.configure(options) == []
    assert added == [([devices[1]], {})]
    with pytest.raises(BackendUnavailable, match="1 GPUs and NPUs found"):
        providers.open_provider("winml", Device("directml:1"))
