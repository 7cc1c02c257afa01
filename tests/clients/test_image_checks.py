"""Images of unmodified clients and of an outside kit of checks, to a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import anthropic
import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file

from image_models import EOS, picture, tiny_model
from image_servers import ImageServer, encoded, opened, uri

KIT = "llm-comply==0.5.0"
CHECKS = {
    "openai-chat": "chat-image-input",
    "open-responses": "image-input",
    "anthropic": "anth-image-input",
}
IMAGES = [picture(70, 45, 1), picture(60, 60, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model that ends its greedy answers after a few tokens."""
    folder = tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("model")).folder
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][EOS] *= 8
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    with ImageServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server):
    """The engine's own answer."""
    parts = [{"type": "text", "text": "See"}]
    parts += [{"type": "image", "image": image} for image in IMAGES]
    with opened(server.folder) as engine:
        return engine.chat([{"role": "user", "content": parts}], max_tokens=6).text


def test_the_openai_client_sends_images(server, expected):
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        parts = [{"type": "text", "text": "See"}]
        parts += [{"type": "image_url", "image_url": {"url": uri(image)}}
                  for image in IMAGES]  # fmt: skip
        chat = client.chat.completions.create(
            model="hash", messages=[{"role": "user", "content": parts}], max_tokens=6,
            temperature=0,
        )  # fmt: skip
        assert chat.choices[0].message.content == expected
        items = [{"type": "input_text", "text": "See"}]
        items += [{"type": "input_image", "image_url": uri(image), "detail": "auto"}
                  for image in IMAGES]  # fmt: skip
        with client.responses.stream(
            model="hash", input=[{"role": "user", "content": items}], temperature=0,
            max_output_tokens=6,
        ) as stream:  # fmt: skip
            assert stream.get_final_response().output_text == expected


def test_the_anthropic_client_sends_images(server, expected):
    blocks = [{"type": "text", "text": "See"}]
    for image in IMAGES:
        source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
        blocks.append({"type": "image", "source": source})
    ask = {"model": "hash", "messages": [{"role": "user", "content": blocks}],
           "max_tokens": 6, "extra_body": {"temperature": 0}}  # fmt: skip
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0
    ) as client:
        message = client.messages.create(**ask)
        assert message.content[0].text == expected
        with client.messages.stream(**ask) as stream:
            assert stream.get_final_text() == expected
        del ask["max_tokens"], ask["extra_body"]
        count = client.messages.count_tokens(**ask).input_tokens
    usage = message.usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens > 12


@pytest.fixture(scope="module")
def kit():
    """The kit's command, in an environment of its own."""
    folder = Path(tempfile.gettempdir()) / "inl-clients" / "llm-comply"
    command = folder / "bin" / "llm-comply"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", KIT]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot be installed: {done.stderr[-200:]}")
    return command


@pytest.mark.long
@pytest.mark.parametrize("dialect", CHECKS)
def test_checks_of_images_pass(server, kit, dialect):
    words = [kit, "-u", f"{server.url}/v1", "-k", "none", "-m", "hash", "--json",
             "--format", dialect, "-f", CHECKS[dialect]]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout)["summary"]
    assert (summary["total"], summary["passed"]) == (1, 1), done.stdout
