"""``inl pull``, ``list``, ``rm`` and ``ps``."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

needs_hub = pytest.mark.skipif(
    find_spec("huggingface_hub") is None, reason="needs huggingface_hub"
)
REPO = "bartowski/Llama-3.2-1B-Instruct-GGUF"


def hub_cache(folder):
    """Write a cache of Hugging Face with two files of one repository."""
    repo = folder / f"models--{REPO.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    for path in (repo / "blobs", repo / "refs", snapshot):
        path.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    for kind, size in (("Q4_K_M", 3072), ("Q8_0", 5120)):
        (repo / "blobs" / kind).write_bytes(b"x" * size)
        link = snapshot / f"Llama-3.2-1B-Instruct-{kind}.gguf"
        link.symlink_to(f"../../blobs/{kind}")
    return repo


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "other.gguf").write_bytes(b"x" * 2048)
    return {"INL_CACHE": str(folder), "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}  # fmt: skip


@needs_hub
def test_what_is_stored_is_listed_pulled_and_removed(inl, cache, tmp_path):
    repo = hub_cache(tmp_path / "hub")
    listed = json.loads(inl("list", "--json", env=cache).stdout)
    assert [(row["name"], row["bytes"]) for row in listed] == [
        ("other.gguf", 2048), (REPO, 8192),
    ]  # fmt: skip
    pulled = inl("pull", "llama3.2:1b", env=cache)
    assert pulled.stdout.strip().endswith("Llama-3.2-1B-Instruct-Q4_K_M.gguf")
    asked = inl("rm", "llama3.2:1b", env=cache, input="")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    done = inl("rm", "llama3.2:1b", "--yes", env=cache)
    assert (done.returncode, done.stdout) == (
        0, "removed llama3.2:1b, 3.0 KiB freed\n",
    )  # fmt: skip
    assert sorted(path.name for path in (repo / "blobs").iterdir()) == ["Q8_0"]
    again = inl("rm", "llama3.2:1b", "--yes", env=cache)
    assert (again.returncode, "not in a cache" in again.stderr) == (2, True)
    assert inl("rm", f"hf.co/{REPO}", "--yes", env=cache).returncode == 0
    assert not repo.exists()


def test_files_of_the_cache_are_removed_and_paths_are_not(inl, cache, tmp_path):
    assert inl("rm", "other.gguf", "--yes", env=cache).returncode == 0
    assert inl("list", env=cache).stdout == ""
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"x")
    done = inl("rm", str(mine), "--yes", env=cache)
    assert (done.returncode, "is a path" in done.stderr) == (2, True)
    assert mine.exists()


class Handler(BaseHTTPRequestHandler):
    """Answers as a server with one model."""

    def do_GET(self):
        row = {"name": "a:latest", "size": 2048, "size_vram": 0, "context_length": 64,
               "expires_at": "2999-01-01T00:00:00Z"}  # fmt: skip
        wrong = self.headers["authorization"] != "Bearer k"
        self.send_response(401 if wrong else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"models": [row]}).encode())

    def log_message(self, *_):
        pass


def test_loaded_models_are_those_of_the_server(inl):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        shown = inl("ps", url, "--api-key", "k")
        refused = inl("ps", url)
        server.shutdown()
    assert shown.stdout == "a:latest  2.0 KiB  memory  64  the server stops\n"
    assert (refused.returncode, "--api-key" in refused.stderr) == (2, True)
    gone = inl("ps", url)
    assert (gone.returncode, "no server answers" in gone.stderr) == (2, True)
