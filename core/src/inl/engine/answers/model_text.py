"""The text side of a model: prompts as token ids, and parsers of its output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from inl.engine.answers.conversation import Conversation, Gap, Prompt
from inl.engine.answers.forced_call import forced_call
from inl.engine.answers.generic_tools import with_tools
from inl.engine.answers.markup import CallMarkup, Markup, ReasoningMarkup, derive
from inl.engine.answers.markup_parser import MarkupParser
from inl.engine.answers.output_parser import PLAIN, OutputParser
from inl.engine.prompt_images import without_images
from inl.errors import InlError, RequestError, TemplateError
from inl.text.fill_in_middle import fill_ids, needed_tokens
from inl.text.measure import check_length
from inl.text.tokenizer import BYTE_TOKEN, SPACE

if TYPE_CHECKING:
    from inl.text.template import ChatTemplate
    from inl.text.tokenizer import Tokenizer

TAIL = 64
"""Tokens at the end of a prompt that may begin the reasoning."""


MAX_BEGINNINGS = 256
"""Variables of templates for which is kept whether they begin the reasoning."""


class EncodedPrompt(NamedTuple):
    """A prompt, its token ids, and the reasoning within which it ends, if it does."""

    prompt: Prompt
    ids: tuple[int, ...]
    reasoning: ReasoningMarkup | None

    @property
    def images(self) -> list[Any]:
        """The images of its messages, in order."""
        if not isinstance(self.prompt, Conversation):
            return []
        return without_images(self.prompt.messages)[1]


class TextSource(Protocol):
    """What has a model's tokenizer and chat template, such as an engine."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``RequestError`` if the model has none."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, if the model has one."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and output."""

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return a conversation's token ids."""


class ModelText:
    """Encodes the prompts of a model and parses its output."""

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self._beginnings: dict[bytes, bool] = {}
        """Whether the template begins the reasoning, by the hash of its variables."""
        self.markup = Markup(CallMarkup())
        """How the model writes calls and reasoning, once it is warmed up."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``RequestError`` if the model has none."""
        return self._source.tokenizer

    @property
    def token_texts(self) -> VocabularyTexts:
        """The texts of the tokens."""
        return VocabularyTexts(self._source)

    def warm_up(self) -> None:
        """Build the tokenizer and start the template's process, if it has them."""
        with suppress(RequestError):
            self.tokenizer.encode("a")
        template = self._source.chat_template
        if template is not None:
            self.markup = derive(template.apply, template.source)
            self._beginnings.clear()

    def encode_test(self) -> list[int]:
        """Encode a text and a conversation; return the ids of the text.

        Raises what would keep others from being encoded.
        """
        ids = [0]
        with suppress(RequestError):  # without a tokenizer
            ids = self.tokenizer.encode("a") or ids
        try:
            if self._source.chat_template is not None:
                self._source.chat_ids([{"role": "user", "content": "a"}])
        except (RequestError, TemplateError) as error:
            if isinstance(error.__cause__, OSError):
                raise  # its process cannot start; else a template of other messages
        return ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; raises the engine's errors."""
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str):
            check_length(self.tokenizer, prompt, self._source.context)
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Gap):
            return fill_ids(
                self.tokenizer,
                prompt.prefix,
                prompt.suffix,
                prompt.files,
                context=self._source.context,
            )
        return self._encode_conversation(prompt)

    def _encode_conversation(self, conversation: Conversation) -> list[int]:
        messages = conversation.messages
        variables = dict(conversation.variables)
        tools = () if conversation.tool_choice == "none" else conversation.tools
        if not self.markup.has_tools:
            messages = with_tools(conversation, tools)
        elif tools:
            variables["tools"] = [tool.as_template_value() for tool in tools]
        ids = self._source.chat_ids(
            messages,
            continue_final_message=conversation.continue_final,
            **variables,
        )
        if not conversation.context:
            return ids
        tokenizer = self.tokenizer
        # One that begins each turn too is no beginning of the text only.
        if tokenizer.token(ids[0]) == tokenizer.bos_token and ids.count(ids[0]) == 1:
            ids = ids[1:]
        return [*conversation.context, *ids]

    def encode_all(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Encode several prompts; raises the engine's errors.

        It may take a while, also to render what begins the reasoning.
        """
        encoded = []
        for prompt in prompts:
            ids = tuple(self.encode(prompt))
            reasoning = self._begun_reasoning(prompt, ids)
            encoded.append(EncodedPrompt(prompt, ids, reasoning))
        return encoded

    def structure_of(
        self, structure: Mapping[str, Any] | None, encoded: EncodedPrompt
    ) -> Mapping[str, Any] | None:
        """Return the structure of a prompt's output; ``None`` is any text.

        structure: of the content, which begins behind the reasoning that the prompt
        has begun.
        """
        prompt = encoded.prompt
        if isinstance(prompt, Conversation) and is_forced(prompt):
            calls = self.markup.calls or CallMarkup()
            structure = forced_call(prompt.tools, prompt.tool_choice, calls)
        if structure is None or encoded.reasoning is None:
            return structure
        return {**structure, "after": encoded.reasoning.end}

    def stop_ids(
        self, given: Collection[int], encoded: EncodedPrompt
    ) -> Collection[int]:
        """Return the ids that end a prompt's output: those of its options, and more."""
        if not isinstance(encoded.prompt, Gap):
            return given
        return {*given, *needed_tokens(self.tokenizer).ends}

    def parser(self, encoded: EncodedPrompt) -> OutputParser:
        """Return the parser of a prompt's output; texts have no markup."""
        prompt, begun = encoded.prompt, encoded.reasoning
        if not isinstance(prompt, Conversation):
            return PLAIN
        if is_forced(prompt):
            forced = self.markup.calls or CallMarkup()
            is_reasoning = begun is not None
            return MarkupParser(
                forced, begun, is_reasoning=is_reasoning, is_forced=True
            )
        tools = [tool.name for tool in prompt.tools]
        offered = prompt.tools and prompt.tool_choice != "none"
        calls = self.markup.calls if offered else None
        reasoning = self.markup.reasoning
        if calls is None and reasoning is None:
            return PLAIN
        return MarkupParser(
            calls,
            reasoning,
            is_reasoning=begun is not None,
            tools=tools,
            only_tools=prompt.only_tools,
            one_call=not prompt.parallel_calls,
        )

    def _begun_reasoning(
        self, prompt: Prompt, ids: Sequence[int]
    ) -> ReasoningMarkup | None:
        """Return the markup of the reasoning within which a prompt ends, if it does.

        The template begins it behind the last message, or the client in an answer that
        is continued; what other messages say of marks has no meaning.
        """
        reasoning = self.markup.reasoning
        if reasoning is None or not isinstance(prompt, Conversation):
            return None
        tail = self.tokenizer.decode(ids[-TAIL:], skip_special=False)
        if not prompt.continue_final:
            has_begun = tail.rstrip().endswith(reasoning.begin)
            return reasoning if has_begun and self._begins(prompt) else None
        last = prompt.messages[-1]
        text = last.get("content") or ""
        if not text and last.get("reasoning_content"):
            return None if reasoning.end in tail else reasoning
        has_begun = text.rfind(reasoning.begin) > text.rfind(reasoning.end)
        return reasoning if has_begun else None

    def _begins(self, prompt: Conversation) -> bool:
        """Whether the template itself, not the last message, begins the reasoning."""
        reasoning, template = self.markup.reasoning, self._source.chat_template
        if reasoning is None or template is None:
            return False
        variables = json.dumps(prompt.variables, sort_keys=True, default=repr)
        key = hashlib.sha256(variables.encode()).digest()  # they may be large
        begun = self._beginnings.get(key)
        if begun is None:
            begun = True
            # A template that refuses the probe keeps what the prompt's end says.
            with suppress(InlError):
                messages = template.shapes.fit([{"role": "user", "content": "a"}])
                text = template.apply(messages, **prompt.variables)
                begun = text.rstrip().endswith(reasoning.begin)
            if len(self._beginnings) >= MAX_BEGINNINGS:
                self._beginnings.clear()  # also of what other threads have found
            self._beginnings[key] = begun
        return begun


class VocabularyTexts:
    """The texts of a model's tokens, see :class:`TokenTexts`."""

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token within a text; empty for an unknown id."""
        tokenizer = self._source.tokenizer
        spelled = tokenizer.token(token)
        if spelled is None:
            return b""
        if tokenizer.byte_level:
            return tokenizer.token_bytes(token)
        if token in tokenizer.special_ids:
            return spelled.encode()
        if not tokenizer.marks_spaces:
            return self.first(token)
        if byte := BYTE_TOKEN.fullmatch(spelled):
            return bytes.fromhex(byte[1])
        return spelled.replace(SPACE, " ").encode()

    def first(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text."""
        tokenizer = self._source.tokenizer
        if tokenizer.byte_level or tokenizer.is_byte(token):
            return self(token)
        return tokenizer.decode([token], skip_special=False).encode()

    def is_special(self, token: int) -> bool:
        """Whether a token is special, and so no part of an answer's text."""
        return token in self._source.tokenizer.special_ids


def is_forced(conversation: Conversation) -> bool:
    """Whether the output must be a tool call."""
    return conversation.tool_choice not in ("auto", "none")
