"""Models of the Hugging Face hub, with a fake ``huggingface_hub``: no network."""

from __future__ import annotations

import fnmatch
import json
import re
import sys
import types
from pathlib import Path

import pytest

from inl.checkpoints.hub import hugging_face
from inl.checkpoints.hub.hugging_face import HubName, parse_name
from inl.checkpoints.hub.resolve import resolve_model
from inl.errors import CheckpointError, MissingPackage

SHARDED = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "model-1.safetensors": b"1",
    "model-2.safetensors": b"2",
    "pytorch_model.bin": b"large",
    "original/params.json": b"{}",
    "consolidated.safetensors": b"large",
    "README.md": b"",
}
WHOLE = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"all",
    "extra.safetensors": b"large",
}
QUANTIZED = {
    "m-Q4_K_M.gguf": b"GGUF4",
    "m-Q4_K_S.gguf": b"GGUF4s",
    "m-IQ4_K_M.gguf": b"other",
    "m-f16-00001-of-00002.gguf": b"part",
    "m-f16-00002-of-00002.gguf": b"part",
    "README.md": b"",
}


class Errors(types.ModuleType):
    """The error classes of the package, with their base classes."""

    class RepositoryNotFoundError(OSError):
        pass

    class GatedRepoError(RepositoryNotFoundError):
        pass

    class RevisionNotFoundError(OSError):
        pass

    class LocalEntryNotFoundError(FileNotFoundError):
        pass

    class HFValidationError(ValueError):
        pass


class Hub(types.ModuleType):
    """Repositories in a dictionary and a cache in a folder."""

    def __init__(self, cache):
        super().__init__("huggingface_hub")
        self.cache, self.online, self.fetched = Path(cache), True, []
        self.errors = Errors("huggingface_hub.errors")
        self.constants = types.SimpleNamespace(HF_HUB_CACHE=cache)
        self.repositories = {
            ("org/sharded", None): SHARDED,
            ("org/whole", None): WHOLE,
            ("org/whole", "v2"): WHOLE,
            ("org/quants", None): QUANTIZED,
            ("org/one", None): {"deep/only.gguf": b"GGUF", "README.md": b""},
            ("org/bin", None): {"config.json": b"{}", "pytorch_model.bin": b""},
            ("org/raw", None): {"config.json": b"{}", "model.safetensors": b""},
            ("org/two", None): {**WHOLE, "model.safetensors": None},
        }

    def files(self, repo, revision):
        if not self.online:
            raise ConnectionError("Name or service not known\nmore lines")
        if repo == "org/gated":
            raise self.errors.GatedRepoError("403 Client Error\n\nAccess to ...")
        if all(known != repo for known, _ in self.repositories):
            raise self.errors.RepositoryNotFoundError("404 Client Error")
        if (repo, revision) not in self.repositories:
            raise self.errors.RevisionNotFoundError("404 Client Error")
        held = self.repositories[repo, revision]
        return {name: data for name, data in held.items() if data is not None}

    def model_info(self, repo_id, *, revision=None, timeout=None):
        assert 0 < timeout <= 30
        names = self.files(repo_id, revision)
        siblings = [types.SimpleNamespace(rfilename=name) for name in names]
        return types.SimpleNamespace(siblings=siblings)

    def folder(self, repo, revision):
        return self.cache / repo.replace("/", "--") / (revision or "main")

    def hf_hub_download(self, repo_id, filename, *, revision=None):
        self.snapshot_download(repo_id, allow_patterns=[filename], revision=revision)
        return str(self.folder(repo_id, revision) / filename)

    def snapshot_download(
        self, repo_id, *, revision=None, allow_patterns=None, local_files_only=False
    ):
        folder = self.folder(repo_id, revision)
        if local_files_only:
            if not folder.is_dir():
                raise self.errors.LocalEntryNotFoundError("Cannot find ...")
            return str(folder)
        for name, data in self.files(repo_id, revision).items():
            path = folder / name
            wanted = any(fnmatch.fnmatch(name, one) for one in allow_patterns)
            if wanted and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self.fetched.append(name)
        return str(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = Hub(tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", fake.errors)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None, None)),
        ("Org-1/na.me_2", ("Org-1/na.me_2", None, None)),
        ("org/name@main", ("org/name", "main", None)),
        ("org/name@refs/pr/1:Q4_K_M", ("org/name", "refs/pr/1", "Q4_K_M")),
        ("org/name:a/b.gguf", ("org/name", None, "a/b.gguf")),
    ],
)
def test_names(text, expected):
    assert parse_name(text) == HubName(*expected)


def test_shards_are_those_of_the_index(hub):
    path = resolve_model("org/sharded")
    assert sorted(item.name for item in path.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_only_needed_files_are_downloaded(hub):
    path = resolve_model("org/whole")
    assert (path / "model.safetensors").read_bytes() == b"all"
    assert hub.fetched == ["config.json", "tokenizer.json", "model.safetensors"]


def test_a_revision_is_another_folder(hub):
    assert resolve_model("org/whole@v2") != resolve_model("org/whole")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/quants:m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("org/quants:q4_k_s", "m-Q4_K_S.gguf"),
        ("org/quants:Q4_K_M", "m-Q4_K_M.gguf"),
        ("org/one", "deep/only.gguf"),
    ],
)
def test_one_gguf(name, file, hub):
    path = resolve_model(name)
    assert path.as_posix().endswith(file)
    assert path.is_file()
    assert hub.fetched == [file]


def test_the_cache_serves_without_a_network(hub):
    names = ["org/whole", "org/whole@v2", "org/one", "org/quants:Q4_K_S"]
    paths = [resolve_model(name) for name in names]
    hub.online, hub.fetched = False, []
    assert [resolve_model(name) for name in names] == paths
    assert hub.fetched == []


def test_an_existing_path_takes_precedence(hub, tmp_path):
    (tmp_path / "org" / "whole").mkdir(parents=True)
    assert resolve_model("org/whole") == Path("org/whole")
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/none", ["org/none", "neither a local path nor a repository"]),
        ("org/gated", ["gated", "https://huggingface.co/org/gated", "HF_TOKEN"]),
        ("org/whole@v9", ["revision: found 'v9'", "a branch, a tag"]),
        ("org/quants", ["found 5 GGUF files", "org/quants:FILE", "m-Q4_K_M.gguf"]),
        ("org/quants:Q8_0", ["file: found 'Q8_0'", "matches no file", "m-Q4_K_M.gguf"]),
        ("org/quants:f16", ["file: found 'f16'", "matches m-f16-00001-of-00002.gguf"]),
        ("org/quants:m-f16-00001-of-00002.gguf", ["a part of a split model", "merge"]),
        ("org/quants:../m.gguf", ["'../m.gguf'", "matches no file"]),
        ("org/bin", ["neither safetensors nor GGUF", "model.safetensors"]),
        ("org/raw", ["tokenizer.model or tiktoken.model: missing"]),
    ],
)
def test_errors_are_one_line(name, parts, hub):
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name)
    message = str(caught.value)
    assert [part for part in ["accept", *parts] if part not in message] == []
    assert "\n" not in message
    assert hub.fetched == []


def test_without_a_network_and_a_cached_copy(hub):
    hub.online = False
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/whole")
    message = str(caught.value)
    for part in ("org/whole: not in the cache", "Name or service not known", "a path"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["errno", "cause", "text"])
def test_a_full_disk_is_a_checkpoint_error(hub, monkeypatch, kind):
    def full(*args, **options):
        error = OSError(28, "No space left on device")
        if kind == "cause":
            raise RuntimeError("file = get_http_url(\n") from error
        raise error if kind == "errno" else RuntimeError("x: (os error 28)")

    monkeypatch.setattr(hub, "snapshot_download", full, raising=False)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/whole")
    where = re.escape(str(hub.constants.HF_HUB_CACHE))
    pattern = rf"org/whole: cannot be stored in {where}: found .*; accepted: .*HF_HOME"
    assert re.search(pattern, str(caught.value)), caught.value


def test_a_failed_download_is_a_checkpoint_error(hub, monkeypatch):
    def broken(*args, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hub, "snapshot_download", broken, raising=False)
    with pytest.raises(CheckpointError, match=r"cannot be downloaded.*Input/output"):
        resolve_model("org/whole")


def test_a_missing_package_gives_the_install_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r"pip install .*core\[hub\]"):
        resolve_model("org/name")


def test_the_fake_hub_has_the_real_signatures(hub, monkeypatch):
    monkeypatch.undo()
    real = pytest.importorskip("huggingface_hub")
    import inspect

    for name in ("model_info", "snapshot_download", "hf_hub_download"):
        theirs = inspect.signature(getattr(real, name)).parameters
        ours = inspect.signature(getattr(hub, name)).parameters
        assert set(ours) <= set(theirs), name
    for name in vars(Errors):
        if name.endswith("Error"):
            assert hasattr(__import__("huggingface_hub.errors").errors, name)
    assert hugging_face.TIMEOUT_SECONDS < 30
