"""Settings beside a folder's tokenizer.json: special tokens and chat templates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from inl.checkpoints.files.json_text import parse_json, read_json
from inl.checkpoints.files.tensor_file import read_bytes, show
from inl.errors import CheckpointError, TokenizerNotFound

if TYPE_CHECKING:
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

CONFIG: Final = "tokenizer_config.json"
RULES: Final = "tokenizer.json"
ADDED: Final = "added_tokens.json"
PIECES: Final = "tokenizer.model"
"""A SentencePiece vocabulary, which is read where there is no ``RULES``; that of Llama
3 is as ``RANKS``."""
RANKS: Final = "tiktoken.model"
"""A vocabulary of tiktoken, which is read where there is no ``RULES``."""
MAX_TOKENIZER: Final = 64 << 20
"""Size limit of ``RULES`` in bytes; real ones are below 40 MiB."""
MAX_VOCABULARY: Final = 16 << 20
"""Size limit of ``PIECES`` and ``RANKS`` in bytes; real ones are below 8 MiB."""
TOOL_USE: Final = "tool_use"
"""Name of the template for conversations with tools."""
TEMPLATE_FILES: Final = {
    "default": "chat_template.jinja",
    TOOL_USE: f"additional_chat_templates/{TOOL_USE}.jinja",
}
"""File of each template. The field of ``CONFIG`` is not read beside the default's."""
SPECIAL_TOKENS: Final = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
"""Fields that name a special token; chat templates have a variable for each."""
MAX_TEMPLATE: Final = 1 << 20
"""Size limit of a template's file in bytes; real ones are below 32 KiB."""


@final
class TokenizerSettings:
    """tokenizer_config.json and special_tokens_map.json of a folder, if they exist.

    A special token that both name is that of tokenizer_config.json.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rules: bytes | None = None
        """Content of ``RULES``, until the tokenizer is built."""
        self._tokenizer: Tokenizer | None = None
        self._fields = optional_json(folder / CONFIG)
        named = optional_json(folder / "special_tokens_map.json")
        self.special_tokens = dict(_special_tokens(folder, named, self._fields))
        """Texts of the special tokens, by field."""

    def end_token_id(self) -> int | None:
        """Return the id of ``eos_token``; ``None`` if there is none."""
        text = self.special_tokens.get("eos_token")
        if text is None:
            return None
        for index, (added, _) in self.added_tokens().items():
            if added == text:
                return index
        return self._id_of_rules(text)

    @property
    def frame(self) -> dict[str, bool]:
        """Whether texts begin and end with special tokens, where a file says so."""
        names = "add_bos_token", "add_eos_token"
        fields = {name: self._fields.get(name) for name in names}
        return {
            name: bool(value) for name, value in fields.items() if value is not None
        }

    def tokenizer(self, model_type: Any) -> Tokenizer:
        """Build the tokenizer of ``RULES``, else of ``RANKS`` or ``PIECES``, once.

        model_type: of the config, by which texts are split. Raises
        :class:`CheckpointError`.
        """
        if self._tokenizer is None:
            tokenizer = self._built(model_type)
            for name in ("bos_token", "eos_token"):
                if not getattr(tokenizer, name):
                    setattr(tokenizer, name, self.special_tokens.get(name, ""))
            self._tokenizer, self._rules = tokenizer, None
        return self._tokenizer

    def _built(self, model_type: Any) -> Tokenizer:
        from inl.checkpoints.files import sentencepiece, tiktoken_file, tokenizer_file

        if (text := self._rules_text()) is not None:
            return tokenizer_file.load_tokenizer(text, str(self._folder / RULES))
        files = (self._folder / RANKS, self._folder / PIECES)
        path = next((path for path in files if os.path.lexists(path)), None)
        if path is None:
            raise TokenizerNotFound(
                f"{self._folder / RULES}: not found; accepted: a tokenizer.json beside "
                f"the model, {PIECES} or {RANKS}"
            )
        data = read_bytes(path, MAX_VOCABULARY, self._folder)
        where, added = str(path), self.added_tokens()
        if path.name == PIECES and not tiktoken_file.is_tiktoken(data):
            return sentencepiece.parse_sentencepiece(data, where, added, self.frame)
        kind = self._fields.get("tokenizer_class")
        rules = tiktoken_file.rules_of(model_type, kind, where)
        return tiktoken_file.parse_tiktoken(
            data, where, rules, added, self.special_tokens, self.frame
        )

    def _rules_text(self) -> bytes | None:
        """Read ``RULES`` once; ``None`` without it."""
        path = self._folder / RULES
        if self._rules is None and os.path.lexists(path):
            self._rules = read_bytes(path, MAX_TOKENIZER, self._folder)
        return self._rules

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Return text and whether it is special of each added token, by id."""
        listed = self._fields.get("added_tokens_decoder")
        if isinstance(listed, Mapping):
            tokens = ((index, token) for index, token in listed.items())
            return {
                int(index): (text, bool(token.get("special")))
                for index, token in tokens
                if isinstance(token, Mapping)
                and (text := _text(token)) is not None
                and index.isdecimal()
            }
        special = set(self.special_tokens.values())
        added = optional_json(self._folder / ADDED)
        return {
            index: (text, text in special)
            for text, index in added.items()
            if type(index) is int
        }

    def _id_of_rules(self, text: str) -> int | None:
        """Return the id of a token of tokenizer.json."""
        source = self._rules_text()
        rules = parse_json(source, str(self._folder / RULES)) if source else {}
        added, model = rules.get("added_tokens"), rules.get("model")
        vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
        found = vocabulary.get(text) if isinstance(vocabulary, Mapping) else None
        for token in added if isinstance(added, list) else ():
            if isinstance(token, Mapping) and token.get("content") == text:
                found = token.get("id")
        return found if type(found) is int and found >= 0 else None

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template, with the one for tools if there are two."""
        where, source = self._template("default")
        if source is None:
            return None
        from inl.text.template import ChatTemplate

        tools_where, tools = self._template(TOOL_USE)
        tokens = self.special_tokens
        tool_use = (
            None
            if tools is None
            else ChatTemplate(tools, where=tools_where, special_tokens=tokens)
        )
        return ChatTemplate(
            source, where=where, special_tokens=tokens, tool_use=tool_use
        )

    def _template(self, name: str) -> tuple[str, str | None]:
        """Return location and source of a template: of its file, else of the field."""
        file = self._folder / TEMPLATE_FILES[name]
        if os.path.lexists(file):
            try:
                text = read_bytes(file, MAX_TEMPLATE, self._folder).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{file}: cannot be read: {error}; accepted: a file in UTF-8"
                ) from error
            return str(file), text
        where = f"{self._folder / CONFIG}: chat_template"
        has_files = os.path.lexists(self._folder / TEMPLATE_FILES["default"])
        source = None if has_files else self._fields.get("chat_template")
        if isinstance(source, list):
            source, where = _named(source, name), f"{where}: {name}"
        elif name != "default":
            source = None
        if source is None or isinstance(source, str):
            return where, source
        raise CheckpointError(
            f"{where}: found {show(source)}; accepted: a string, or a list with a "
            "default"
        )


def optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a folder, ``{}`` if it does not exist."""
    return read_json(path, path.parent) if os.path.lexists(path) else {}


def _special_tokens(
    folder: Path, *sources: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the special tokens of each source; a later one replaces an earlier one."""
    for fields in sources:
        for name in SPECIAL_TOKENS:
            token = fields.get(name)
            text = _text(token)
            if text is not None:
                yield name, text
            elif token is not None:
                raise CheckpointError(
                    f"{folder / CONFIG}: {name}: found {show(token)}; "
                    "accepted: a string, or an object with content"
                )


def _text(token: Any) -> str | None:
    """Return the text of a token: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _named(templates: list[Any], name: str) -> Any:
    """Return the template of a list with a name, or ``None``."""
    named = (
        item.get("template")
        for item in templates
        if isinstance(item, dict) and item.get("name") == name
    )
    return next(named, None)
