"""Options that commands share: which commands have them, and what they do."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from inl.cli.app import import_command as command
from inl.cli.main import main
from inl.cli.option_groups import (
    CONFIG_NAMES,
    EngineOptions,
    KernelOptions,
    SamplingOptions,
    SpeculativeOptions,
    with_groups,
)
from inl.config import EngineConfig
from inl.errors import RequestError
from inl.testing.tiny import tiny_llama
from lora_files import LoraFiles

COMMANDS = {
    "explain": KernelOptions,
    "replay": KernelOptions,
    "bench": EngineOptions,
    "bench-mix": EngineOptions,
    "generate": SpeculativeOptions,
    "chat": SpeculativeOptions,
    "serve": SpeculativeOptions,
    "run-batch": SpeculativeOptions,
    "trace": SpeculativeOptions,
}
WORDS = ("--device", "reference", "--max-tokens", "12", "--temperature", "0")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_every_option_of_its_engine(name):
    found = {parameter.name for parameter in command(name).params}
    assert {each.name for each in fields(COMMANDS[name])} <= found


def test_defaults_are_those_of_the_engine():
    assert SpeculativeOptions().config() == EngineConfig()


@pytest.mark.parametrize("each", fields(SpeculativeOptions), ids=lambda each: each.name)
def test_each_option_sets_its_field(each):
    values = {
        "device": "cuda:1", "dtype": "float16", "kv_dtype": "fp8", "quantize": "int4",
        "placement": "tensor=2", "tensor_parallel": 2, "mesh": "tensor=2",
        "speculation": "ngram",
        "draft_model": "m", "draft_device": "cpu", "max_drafts": 3,
        "generation_config": "none", "kv_host": "8GiB", "kv_disk": "1TiB:folder",
        "snapshot_host": "2GiB",
    }  # fmt: skip
    value = values.get(each.name, not each.default)
    needs = {"draft_model": "model", "draft_device": "model"}
    given = {"speculation": needs.get(each.name), each.name: value}
    if each.name == "draft_device":
        given["draft_model"] = "m"
    config = SpeculativeOptions(**given).config(max_batch=3)
    assert getattr(config, CONFIG_NAMES.get(each.name, each.name)) == value
    assert config.max_batch == 3


def test_server_options_have_the_defaults_of_the_server():
    from inl.cli.serve_options import (
        LimitOptions,
        LoggingOptions,
        NetworkOptions,
        StorageOptions,
    )
    from inl.serve.settings import ServerConfig

    server, limits = ServerConfig(), LimitOptions()
    for name in (
        "max_queue", "max_queued_tokens", "max_per_key", "max_connections",
        "receive_seconds", "send_seconds", "idle_seconds", "drain_seconds",
    ):  # fmt: skip
        assert getattr(limits, name) == getattr(server, name)
    storage = StorageOptions()
    for name in (
        "files", "max_file_bytes", "max_file_bytes_per_key", "stored_responses",
        "stored_response_bytes", "stored_response_seconds",
    ):  # fmt: skip
        assert getattr(storage, name) == getattr(server, name)
    assert limits.max_body == server.max_body_bytes
    assert limits.max_header == server.max_header_bytes
    assert limits.idle_unload == server.idle_unload
    assert LoggingOptions().vllm_metrics == server.vllm_metrics
    assert NetworkOptions().host == server.host
    assert NetworkOptions().port == server.port


@dataclass(frozen=True, kw_only=True)
class Pair:
    left: Annotated[int, typer.Option(min=1)] = 1
    right: Annotated[list[str] | None, typer.Option()] = None


def test_a_group_becomes_options_in_its_place():
    seen = []

    @with_groups
    def run(
        *,
        name: Annotated[str, typer.Argument()],
        pair: Pair,
        last: Annotated[bool, typer.Option("--last")] = False,
    ) -> None:
        seen.append((name, pair, last))

    app = typer.Typer()
    app.command()(run)
    names = [each.name for each in typer.main.get_command(app).params]
    assert names[:4] == ["name", "left", "right", "last"]
    call = CliRunner().invoke
    assert call(app, ["a", "--right", "x", "--right", "y"]).exit_code == 0
    assert call(app, ["b", "--left", "2", "--last"]).exit_code == 0
    assert call(app, ["c", "--left", "0"]).exit_code == 2
    assert seen == [
        ("a", Pair(left=1, right=["x", "y"]), False),
        ("b", Pair(left=2, right=None), True),
    ]


def test_sampling_is_validated_before_a_model_is_loaded():
    assert SamplingOptions(top_k=3).generation_options(["a"])["stop"] == ["a"]
    with pytest.raises(RequestError, match="top_p: found 2"):
        SamplingOptions(top_p=2.0).generation_options()


def test_an_answer_with_drafts_and_without_invariant_kernels(tiny_folder, capsys):
    words = ("generate", "a b a b a b", "--model", str(tiny_folder), "--json", *WORDS)
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main((*words, "--speculation", "ngram", "--no-adaptive-drafts")) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == plain["token_ids"]
    assert main((*words, "--speculation", "other")) == 2
    assert "speculation: found 'other'" in capsys.readouterr().err
    assert main((*words, "--invariant")) == 2
    assert "the invariant option requires" in capsys.readouterr().err


def test_a_chat_uses_an_adapter(inl, tiny_folder, tmp_path):
    _, tensors = tiny_llama(np.random.default_rng(11), vocab=258, kv_heads=2)
    adapter = LoraFiles(tensors, seed=1, rank=20, alpha=60).write(tmp_path / "adapter")
    words = ("chat", "--model", str(tiny_folder), *WORDS)
    plain, adapted = (
        inl(*words, *more, input="Hello.\n")
        for more in ((), ("--adapter", f"mine={adapter}"))
    )
    assert (plain.returncode, adapted.returncode) == (0, 0), adapted.stderr
    assert plain.stdout != adapted.stdout


def test_a_trace_has_the_options_of_sampling(inl, tiny_folder, tmp_path):
    out = str(tmp_path / "trace")
    words = ("trace", "a", "--out", out, "--model", str(tiny_folder), *WORDS)
    plain, penalized = inl(*words), inl(*words, "--repetition-penalty", "3")
    assert (plain.returncode, penalized.returncode) == (0, 0), penalized.stderr
    assert plain.stdout != penalized.stdout


def test_a_trace_is_replayed_with_the_dtype_of_its_cache(inl, tiny_folder, tmp_path):
    out, cache = str(tmp_path / "trace"), ("--kv-dtype", "fp8")
    model = ("--model", str(tiny_folder))
    assert inl("trace", "a", "--out", out, *model, *WORDS, *cache).returncode == 0
    replayed = inl("replay", out, *cache)
    assert "every token is the same" in replayed.stdout, replayed.stderr
    refused = inl("replay", out, "--kv-dtype", "int9")
    assert (refused.returncode, "int9" in refused.stderr) == (2, True)
