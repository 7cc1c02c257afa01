"""The text side of a model, in a process that does not compute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.engine.prompt_encoder import PromptEncoder
from inl.executor.load_plan import configure
from inl.executor.model_loader import open_model

if TYPE_CHECKING:
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer


class TextModel:
    """Tokenizer and chat template of a model, as an engine of the model has them.

    place: folder, file or known name; ``None`` is the default model. context: maximum
    number of tokens of prompt and output, if it is less than the model's. Raises
    :class:`~inl.errors.ModelError`.
    """

    def __init__(self, place: str | None, context: int | None = None) -> None:
        config = EngineConfig(context=context, generation_config="none")
        model = configure(open_model(resolve_model(place)), config)
        self._encoder = PromptEncoder(model, None, config)
        longest = model.config.max_tokens
        self.context: int = min(context or longest, longest)
        """Maximum number of tokens of prompt and output."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``RequestError`` if the model has none."""
        return self._encoder.tokenizer("tokenizer")

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, if the model has one."""
        return self._encoder.chat_template

    def chat_ids(
        self, messages: str | Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Return the token ids of a conversation, see :func:`inl.engine.chat.chat_ids`.

        Raises :class:`~inl.errors.RequestError`.
        """
        return self._encoder.chat_ids(messages, context=self.context, **options)
