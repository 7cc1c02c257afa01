"""``inl completion``: shell completion scripts, and the candidates they request."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from inl.dtypes import FLOATS
from inl.errors import RequestError

SCRIPTS = {
    "bash": """\
_inl_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(inl completion bash --at "$COMP_CWORD" -- "${COMP_WORDS[@]}" \\
        2>/dev/null))
}
complete -o bashdefault -o default -F _inl_complete inl
""",
    "zsh": """\
#compdef inl
_inl_complete() {
    local -a candidates
    candidates=("${(@f)$(inl completion zsh --at $((CURRENT - 1)) -- "${words[@]}" \\
        2>/dev/null)}")
    if [[ -n "${candidates[1]}" ]]; then _describe inl candidates; else _files; fi
}
compdef _inl_complete inl
""",
    "fish": """\
function __inl_complete
    set -l before (commandline -opc)
    inl completion fish --at (count $before) -- $before (commandline -ct) 2>/dev/null
end
complete -c inl -a "(__inl_complete)"
""",
}
SEPARATORS = {"bash": None, "zsh": ":", "fish": "\t"}
"""Separator of a word and its description; ``None``: no descriptions."""
INSTALL = {
    "bash": "inl completion bash > ~/.local/share/bash-completion/completions/inl",
    "zsh": "inl completion zsh > ~/.zfunc/_inl   # a folder on $fpath",
    "fish": "inl completion fish > ~/.config/fish/completions/inl.fish",
}


def run(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    at: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the completion script of SHELL.

    Its first line says how to install it.
    """
    if shell not in SCRIPTS:
        raise RequestError(
            f"shell: found {shell!r:.40}, accepted: {', '.join(SCRIPTS)}"
        )
    if at is None:
        print(f"# {INSTALL[shell]}\n{SCRIPTS[shell]}", end="")
        return
    line = list(words or [])[: at + 1]
    line += [""] * (at + 1 - len(line))
    prefix = ""
    if shell == "bash":
        line, prefix = join_words(line)
    separator = SEPARATORS[shell]
    for word, text in candidates(line[1:-1], line[-1]):
        word = word.removeprefix(prefix)
        escaped = word.replace(":", "\\:") if separator == ":" else word
        described = separator is not None and text
        print(f"{escaped}{separator}{text}" if described else escaped)


def join_words(words: list[str]) -> tuple[list[str], str]:
    """Join the words that bash splits at ``:`` and ``=``.

    Returns the words, and the prefix of the last one that bash does not replace.
    """
    joined: list[str] = []
    after_colon = False
    for index, word in enumerate(words):
        if word == "=" and index:
            # The value is a separate word, and may be empty.
            joined += [""] if index == len(words) - 1 else []
        elif joined and (word == ":" or (after_colon and word)):
            joined[-1] += word
        else:
            joined.append(word)
        after_colon = word == ":"
    last = joined[-1]
    split = len(words) > 1 and ":" in words[-2:]
    return joined, last[: last.rfind(":") + 1] if split else ""


def candidates(before: list[str], current: str) -> list[tuple[str, str]]:
    """Return ``(word, help)`` for words that can replace ``current``.

    before: the words between ``inl`` and ``current``. If the list is empty, the shell
    completes file names.
    """
    from inl.cli.app import COMMANDS, SUMMARIES, import_command
    from inl.plugin.loader import registered_commands

    names = [word for word in before if not word.startswith("-")]
    if not names:
        words = list(SUMMARIES.items())
        words += [(name, text) for name, (_, text) in registered_commands().items()]
        if current.startswith("-"):
            words = [("--help", "help"), ("--version", "the version"), ("--debug", "")]
    elif names[0] not in {*COMMANDS, *registered_commands()}:
        return []
    else:
        words = _command_words(import_command(names[0]), before, current)
    return [(word, text) for word, text in words if word.startswith(current)]


def _command_words(
    parsed: Any, before: list[str], current: str
) -> list[tuple[str, str]]:
    """Return the values or options of a command; ``parsed`` is a click command."""
    by_option = {opt: param for param in parsed.params for opt in param.opts}
    option = by_option.get(before[-1]) if before else None
    if option is not None and not option.is_flag:
        return [(value, "") for value in _values(option.name)]
    if current.startswith("-"):
        return [
            (opt, (getattr(param, "help", None) or "").split(". ")[0].rstrip("."))
            for opt, param in by_option.items()
            if opt.startswith("--") and not param.hidden
        ] + [("--help", "help")]
    arguments = [
        each.name for each in parsed.params if each.param_type_name == "argument"
    ]
    return [(value, "") for value in _values(arguments[0] if arguments else "")]


def _values(parameter: str) -> list[str]:
    if parameter == "device":
        return _devices()
    if parameter == "dtype":
        return ["auto", *FLOATS]
    if parameter == "kind":
        from inl.convert import compressed, gguf_kinds

        return [*gguf_kinds.KINDS, *compressed.KINDS]
    if parameter == "shell":
        return list(SCRIPTS)
    if parameter == "op":
        import inl.ops
        from inl.spec.op import CATALOG

        assert inl.ops, "importing it fills the catalog"
        return sorted(CATALOG)
    return []


def _devices() -> list[str]:
    from inl.plugin import registry

    rows = [row for row in registry().devices() if row.info is not None]
    return ["auto", *(f"{row.type}:{row.info.index}" for row in rows if row.info)]
