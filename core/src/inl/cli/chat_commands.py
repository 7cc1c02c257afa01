"""The /commands of ``inl chat``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import RequestError

if TYPE_CHECKING:
    from inl.cli.chat_session import Chat


class Command(NamedTuple):
    """One /command."""

    usage: str
    help: str
    run: Callable[[Chat, str], str | None]
    """(chat, rest of the line) -> text to print."""


def run_command(chat: Chat, line: str) -> str | None:
    """Run one /command line and return the text to print.

    Raises :class:`RequestError` for an unknown command or a missing argument.
    """
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise RequestError(
            f"{name}: unknown command; accepted: {', '.join(COMMANDS)}, or // to send "
            "a message that begins with a slash"
        )
    rest = rest.strip()
    if command.usage.endswith("FILE") and not rest:
        raise RequestError(f"{name}: found no file name; accepted: {command.usage}")
    return command.run(chat, rest)


def _help(_chat: Chat, _rest: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{each.usage:<{width}}  {each.help}" for each in COMMANDS.values()]
    lines.append(
        f"{'Ctrl-C':<{width}}  stop the answer; twice at an empty prompt: exit"
    )
    return "\n".join(lines)


def _clear(chat: Chat, _rest: str) -> str:
    chat.conversation.clear()
    return "(conversation cleared)"


def _system(chat: Chat, text: str) -> str:
    if not text:
        return f"system: {chat.conversation.system or '(none)'}"
    chat.conversation.system = text
    return "(system prompt set; it applies from the next answer on)"


def _save(chat: Chat, name: str) -> str:
    path = Path(name).expanduser()
    chat.conversation.save(path)
    turns = chat.conversation.turns
    return f"({turns} {'turn' if turns == 1 else 'turns'} written to {path})"


def _load(chat: Chat, name: str) -> str:
    path = Path(name).expanduser()
    chat.conversation.load(path)
    turns = chat.conversation.turns
    return f"({turns} {'turn' if turns == 1 else 'turns'} read from {path})"


def _image(chat: Chat, name: str) -> str:
    path = Path(name).expanduser()
    height, width = chat.attach(path)
    return f"({path}, {width} x {height} pixels, goes with the next message)"


def _retry(chat: Chat, _rest: str) -> None:
    conversation = chat.conversation
    before = list(conversation.messages)
    conversation.pop_last("assistant")
    last = conversation.pop_last("user")
    if last is None:
        raise RequestError("/retry: there is no message to answer again")
    try:
        chat.ask(last["content"], again=True)
    finally:
        if len(conversation.messages) < len(before):
            conversation.messages[:] = before  # no new answer: restore the previous one


def _stats(chat: Chat, _rest: str) -> str:
    return "\n".join(chat.stats())


def _exit(chat: Chat, _rest: str) -> None:
    chat.open = False


COMMANDS = {
    "/help": Command("/help", "list the commands", _help),
    "/clear": Command(
        "/clear", "clear the conversation, keep the system prompt", _clear
    ),
    "/system": Command(
        "/system TEXT", "set the system prompt; without TEXT, show it", _system
    ),
    "/save": Command("/save FILE", "save the conversation as JSON", _save),
    "/load": Command("/load FILE", "load a saved conversation", _load),
    "/image": Command("/image FILE", "attach an image to the next message", _image),
    "/retry": Command("/retry", "answer the last message again", _retry),
    "/stats": Command("/stats", "tokens, context and speed", _stats),
    "/exit": Command("/exit", "exit (also Ctrl-D)", _exit),
}
