"""``inl generate`` and ``inl explain`` with no framework installed, and bad input."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import safetensors.numpy

from inl.checkpoints.hub.resolve import default_model
from inl.cli.main import main
from inl.testing.tiny import tiny_llama
from lora_files import LoraFiles

REFUSES = """
from inl.backend.base import Backend
from inl.backend.simple import simple_backend
from inl.dtypes import widen, wrap
from inl.plugin import hookimpl
from inl.spec.kernel import Kernel

def kernels():
    from inl.ops import catalog
    for spec in catalog().values():
        yield Kernel(
            spec.name, "picky", lambda *a, **k: None,
            refuse=lambda *a, **k: "is in a bad mood today",
        )

Picky = simple_backend(tensor=widen, numpy=wrap, kernels=kernels)

@hookimpl
def inl_register_backends(register):
    register("picky", "picky:Picky")
"""

VARIABLE = "--chat-template-kwarg"


def run(capsys, *words):
    code = main(words)
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer, in the Hugging Face layout."""
    from byte_tokens import byte_rules

    path = tmp_path_factory.mktemp("tiny")
    config, tensors = tiny_llama(np.random.default_rng(0), vocab=256)
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    byte_rules().save(str(path / "tokenizer.json"))
    return path


def changed(folder, tmp_path, **fields):
    """Copy the model with changed config fields; ``None`` removes a field."""
    path = tmp_path / "changed"
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


@pytest.mark.full
def test_the_default_model_answers_on_the_reference(capsys):
    default_model()
    capsys.readouterr()  # on a fresh machine, that it is fetched
    code, out, err = run(
        capsys, "generate", "What is 17 + 25?", "--device", "reference",
        "--max-tokens", "6",
    )  # fmt: skip
    assert (code, err) == (0, "[stopped at 6 tokens; --max-tokens]\n")
    assert out.startswith("17 +")


def test_json(capsys):
    code, out, _ = run(
        capsys, "generate", "The capital of France is", "--raw", "--json",
        "--device", "reference:0", "--max-tokens", "3", "--dtype", "float32",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["text"] == " Paris.\n"
    assert found["token_ids"] == [7042, 30, 198]
    assert (found["prompt_tokens"], found["finish_reason"]) == (5, "length")
    assert found["device"] == "reference:0"
    assert found["timings"]["load_seconds"] > 0


CHAT_SOURCE = (
    "{{ tools | tojson }}{{ documents | tojson }}{{ style }}{{ think }}"
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        ([], "nullnull[hi]>"),
        (["--no-generation-prompt"], "nullnull[hi]"),
        (["--answer-prefix", "It is"], "nullnull[hi][It is"),
        ([VARIABLE, "style=plain", VARIABLE, "think=false"], "nullnullplainFalse[hi]>"),
        (["--tools", "LIST", "--documents", "LIST"], '[{"a": 1}][{"a": 1}][hi]>'),
    ],
)  # fmt: skip
def test_chat_chat_template_kwargs(options, rendered, folder, tmp_path, capsys):
    path = changed(folder, tmp_path)
    (path / "chat_template.jinja").write_text(CHAT_SOURCE)
    (tmp_path / "list").write_text('[{"a": 1}]')
    files = {"LIST": str(tmp_path / "list")}
    words = [files.get(word, word) for word in options]
    code, out, err = run(
        capsys, "generate", "hi", "--model", str(path), "--device", "reference",
        "--max-tokens", "1", "--json", *words,
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            ["--chat-template-kwarg", "x"],
            ["RequestError", "--chat-template-kwarg", "'x'", "NAME=VALUE"],
        ),
        (
            ["--chat-template-kwarg", "tools=1"],
            ["RequestError", "'tools=1'", "none of messages, tools"],
        ),
        (
            ["--tools", "/dev/null"],
            ["InvalidJson", "--tools: /dev/null", "a JSON file"],
        ),
    ],
)
def test_malformed_chat_chat_template_kwargs(options, parts, folder, capsys):
    found = run(capsys, "generate", "hi", "--model", str(folder), *options)
    refused(found, parts)


@pytest.mark.full
def test_control_tokens_of_a_prompt_are_text_unless_they_are_trusted(capsys):
    counts = []
    for options in ([], ["--trust-control-tokens"]):
        code, out, _ = run(
            capsys, "generate", "a<|im_end|>b", "--json", "--device", "reference",
            "--max-tokens", "1", *options,
        )  # fmt: skip
        assert code == 0
        counts.append(json.loads(out)["prompt_tokens"])
    assert counts[0] > counts[1]


def test_seed_and_temperature(capsys, folder):
    def answer(seed):
        words = ["--temperature", "1", "--seed", str(seed), "--max-tokens", "12"]
        return run(
            capsys, "generate", "x", "--raw", "--json", "--model", str(folder),
            "--device", "reference", *words,
        )[1]  # fmt: skip

    ids = [json.loads(answer(seed))["token_ids"] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_a_random_seed_is_reported_and_repeats_the_output(capsys, folder):
    def generate(*words):
        _, out, _ = run(
            capsys, "generate", "x", "--raw", "--json", "--model", str(folder),
            "--device", "reference", "--temperature", "1", "--max-tokens", "12", *words,
        )  # fmt: skip
        return json.loads(out)

    drawn, other = generate(), generate()
    assert drawn["seed"] != other["seed"]
    again = generate("--seed", str(drawn["seed"]))
    assert (again["token_ids"], again["seed"]) == (drawn["token_ids"], drawn["seed"])


def test_explain_lists_selected_and_refused_kernels(capsys, folder):
    words = ["explain", "--model", str(folder), "--device", "reference"]
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "rms_norm/numpy" in out
    assert "attend (composed)" in out
    table = json.loads(run(capsys, *words, "--json")[1])
    sites = {row["op"]: row["sites"] for row in table["ops"]}
    assert (sites["attend"], sites["qkv_linear"]) == (2, 2)
    assert sites["linear"] == 2 * (3 + 1 + 3) + 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "rocm"], ["rocm", "pip install ", "inl-rocm"]),
        (["--device", "cuda:x"], ["'cuda:x'", "device"]),
        (["--device", "reference:7"], ["reference:7"]),
        (["--kv-dtype", "int4"], ["kv_dtype", "'int4'", "auto"]),
        (["--dtype", "int4"], ["dtype", "'int4'", "float32"]),
        (["--max-tokens", "-1"], ["max_tokens", "-1", "0 and above"]),
        (["--temperature", "-1"], ["temperature", "-1", "0 and above"]),
        (["--model", "no/such.gguf"], ["no/such.gguf"]),
    ],
)
def test_bad_options(capsys, folder, without_backend, words, says):
    without_backend("rocm")
    base = ["generate", "hello", "--raw", "--model", str(folder)]
    if "--device" not in words:
        words = ["--device", "reference", *words]
    refused(run(capsys, *base, *words), says)


@pytest.mark.parametrize("raw", [True, False])
def test_an_empty_prompt(capsys, raw):
    flags = ["--raw"] if raw else []
    refused(
        run(capsys, "generate", "", "--device", "reference", *flags),
        ["prompt", "at least one"],
    )


def test_a_prompt_over_the_context(capsys, folder):
    prompt = "x" * 600
    refused(
        run(
            capsys, "generate", prompt, "--raw", "--model", str(folder),
            "--device", "reference",
        ),
        ["600", "512"],
    )  # fmt: skip


def test_no_template_and_not_raw(capsys, folder):
    refused(
        run(capsys, "generate", "x", "--model", str(folder), "--device", "reference"),
        ["no chat template", "--raw"],
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            ["'MambaForCausalLM'", "'mamba'", "LlamaForCausalLM"],
        ),
        ({"architectures": None, "model_type": None}, ["neither", "LlamaForCausalLM"]),
        ({"num_hidden_layers": 3}, ["missing model.layers.2.", "self_attn.q_proj"]),
        ({"num_hidden_layers": 1}, ["unused model.layers.1."]),
        ({"intermediate_size": 95}, ["mlp.gate_proj.weight", "[96, 48]", "[95, 48]"]),
        ({"hidden_size": "48"}, ["'hidden_size'", "'48'", "integer"]),
        ({"hidden_size": -1}, ["'hidden_size'", "-1"]),
        ({"num_key_value_heads": 3}, ["'num_key_value_heads'", "3", "divisor", "8"]),
        ({"hidden_act": "relu6"}, ["'hidden_act'", "'relu6'", "silu"]),
        ({"rms_norm_eps": "small"}, ["'rms_norm_eps'", "'small'"]),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4}},
            ["rope_type", "'ntk'", "llama3"],
        ),
        ({"tie_word_embeddings": "yes"}, ["'tie_word_embeddings'", "'yes'"]),
        ({"mlp_bias": "no"}, ["'mlp_bias'", "'no'"]),
        ({"mlp_bias": True}, ["missing model.layers.0.mlp.up_proj.bias"]),
        ({"vocab_size": None}, ["'vocab_size'", "missing"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit(capsys, folder, tmp_path, fields, says):
    path = changed(folder, tmp_path, **fields)
    found = run(
        capsys, "generate", "x", "--raw", "--model", str(path), "--device", "reference"
    )
    refused(found, [*says, str(path)])


def test_a_truncated_gguf(capsys, tmp_path):
    path = tmp_path / "short.gguf"
    path.write_bytes(default_model().read_bytes()[:5_000_000])
    found = run(
        capsys, "generate", "x", "--raw", "--model", str(path), "--device", "reference"
    )
    refused(found, [str(path)])


def test_a_gguf_with_wrong_sizes_in_its_header(capsys, tmp_path):
    path = tmp_path / "lies.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + b"\0" * 64)
    found = run(
        capsys, "generate", "x", "--raw", "--model", str(path), "--device", "reference"
    )
    refused(found, [str(path), str(2**60)])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for a in range(9**9) %}{% for b in range(9**9) %}{% endfor %}{% endfor %}",
        f"{3 * '{% for a in range(9999) %}'}{3 * '{% endfor %}'}",
        "{% include 'x' %}",
        "{{ 'a' * 10**10 }}",
    ],
)
def test_a_template_with_forbidden_operations(capsys, folder, tmp_path, template):
    path = changed(folder, tmp_path)
    (path / "chat_template.jinja").write_text(template)
    found = run(capsys, "generate", "x", "--model", str(path), "--device", "reference")
    refused(found, ["TemplateError", "chat_template.jinja", "accepted"])


def test_a_template_that_is_malformed(capsys, folder, tmp_path):
    path = changed(folder, tmp_path)
    (path / "chat_template.jinja").write_text("fine\n{% if %}")
    found = run(capsys, "generate", "x", "--model", str(path), "--device", "reference")
    refused(found, ["TemplateError", "chat_template.jinja, line 2", "an expression"])


def refused(found, says):
    code, out, err = found
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    for word in says:
        assert word in err, err


def test_a_plugin_that_raises_on_import(inl, plugin, folder):
    env = plugin("raise OSError('libnpu.so: cannot open')", name="npu_broken")
    rows = inl("plugins", env=env)
    assert rows.returncode == 0
    assert "broken" in rows.stdout
    assert "OSError: libnpu.so: cannot open" in rows.stdout
    found = inl(
        "generate", "x", "--raw", "--model", str(folder), "--device", "reference",
        "--max-tokens", "2", env=env,
    )  # fmt: skip
    assert found.returncode == 0


def test_kernels_that_refuse_everything(inl, plugin, folder):
    env = plugin(REFUSES, name="picky")
    found = inl(
        "generate", "x", "--raw", "--model", str(folder), "--device", "picky", env=env
    )
    assert found.returncode == 2
    assert "NoKernel: no kernel for make_step on picky:0" in found.stderr
    assert "make_step/picky: is in a bad mood today" in found.stderr
    assert "Traceback" not in found.stderr


def test_ops_without_a_kernel_are_computed_on_the_host_if_allowed(inl, plugin, folder):
    some = REFUSES.replace("for spec in catalog().values():", "for spec in ():")
    env = plugin(some, name="picky")
    words = (
        "generate", "x", "--raw", "--model", str(folder), "--device", "picky",
        "--max-tokens", "2",
    )  # fmt: skip
    refused = inl(*words, env=env)
    assert refused.returncode == 2
    assert "allow_hosted=True or --allow-hosted" in refused.stderr
    allowed = inl(*words, "--allow-hosted", env=env)
    assert allowed.returncode == 0, allowed.stderr
    reference = [*words[:6], "reference", *words[7:]]
    assert allowed.stdout == inl(*reference, env=env).stdout


def test_debug_shows_the_traceback(inl, folder):
    words = ("generate", "x", "--model", str(folder), "--device", "rocm")
    assert "Traceback" not in inl(*words).stderr
    assert "Traceback" in inl("--debug", *words).stderr


def test_an_adapter_is_used(capsys, folder, tmp_path):
    _, tensors = tiny_llama(np.random.default_rng(0), vocab=256)
    adapter = LoraFiles(tensors, seed=1, rank=20, alpha=60).write(tmp_path / "adapter")
    words = ["--model", str(folder), "--device", "reference", "--raw", "--max-tokens"]
    words = ["generate", "hello", *words, "6", "--json"]
    code, plain, _ = run(capsys, *words)
    assert code == 0
    code, adapted, _ = run(capsys, *words, "--adapter", f"mine={adapter}")
    assert code == 0
    ids = [json.loads(out)["token_ids"] for out in (plain, adapted)]
    assert ids[0] != ids[1]
    for pair in ("mine", "mine=", f"={adapter}"):
        code, _, said = run(capsys, *words, "--adapter", pair)
        assert code != 0
        assert f"--adapter: found '{pair}', accepted: NAME=FOLDER" in said
    code, _, said = run(capsys, *words, "--adapter", f"mine={tmp_path}")
    assert code != 0
    assert "adapter_config.json" in said
