"""Files of keys: comments are no keys, and files that others can read are named."""

from __future__ import annotations

import logging
import os

import pytest

from inl.cli.serve_options import (
    LimitOptions,
    LoggingOptions,
    NetworkOptions,
    SecurityOptions,
    StorageOptions,
    server_config,
)
from inl.errors import RequestError


def keys_of(path, **security):
    security = security or {"api_key": [f"@{path}"]}
    config = server_config(
        NetworkOptions(), SecurityOptions(**security), LimitOptions(),
        StorageOptions(), LoggingOptions(), frontends=0,
    )  # fmt: skip
    return config.api_keys


def made(tmp_path, text, mode=0o600):
    path = tmp_path / "keys.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_comments_and_blank_lines_are_no_keys(tmp_path):
    text = "\ufeff# of the team\r\n one \r\n\r\n\t# two\r\nthr#ee\r\n#\r\nlast"
    assert keys_of(made(tmp_path, text)) == ("one", "thr#ee", "last")


@pytest.mark.parametrize("text", ["", "\n \n", "# a comment", b"\xef\xbb\xbf"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    with pytest.raises(RequestError, match=r"--api-key @.*keys\.txt: found no key"):
        keys_of(made(tmp_path, text))


@pytest.mark.parametrize("text", [b"\xff\xfek\0", b"k" * (1 << 20) + b"k"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    with pytest.raises(RequestError, match=r"keys\.txt: (is not UTF-8|accepts up to)"):
        keys_of(made(tmp_path, text))


def test_a_file_that_is_none_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RequestError, match="accepts a key, or @PATH"):
            keys_of(path)


def test_a_key_found_twice_is_named_by_its_lines(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "inl.serve"):
        assert keys_of(made(tmp_path, "secret\n#\nother\nsecret\n")) == (
            "secret",
            "other",
        )
    assert "line 4 has the key of line 1 again" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602, 0o600, 0o400])
def test_a_file_that_others_can_read_is_named(tmp_path, caplog, mode):
    path = made(tmp_path, "one", mode)
    with caplog.at_level(logging.WARNING, "inl.serve"):
        assert keys_of(path) == ("one",)
    assert (f"mode {mode:04o}" in caplog.text) == bool(mode & 0o077)
    assert ("chmod 600" in caplog.text) == bool(mode & 0o077)


def test_keys_are_stripped_and_each_is_one(tmp_path, monkeypatch):
    path = made(tmp_path, "a\nb")
    assert keys_of(path, api_key=[" a ", f"@{path}", "c"]) == ("a", "b", "c")
    monkeypatch.setenv("INL_API_KEY", " from the environment \n")
    assert keys_of(path, api_key=None) == ("from the environment",)
    with pytest.raises(RequestError, match="api key: found an empty one"):
        keys_of(path, api_key=[" "])
