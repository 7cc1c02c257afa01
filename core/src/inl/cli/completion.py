"""``inl completion``: what a shell asks when Tab is pressed, and its script."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

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
    local -a found
    found=("${(@f)$(inl completion zsh --at $((CURRENT - 1)) -- "${words[@]}" \\
        2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then _describe inl found; else _files; fi
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
JOINTS = {"bash": None, "zsh": ":", "fish": "\t"}
"""What stands between a word and its description; ``None`` shows the word alone."""
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
    """Print the script that makes SHELL complete ``inl``; with how to install it."""
    if shell not in SCRIPTS:
        raise RequestError(
            f"shell: found {shell!r:.40}, accepted: {', '.join(SCRIPTS)}"
        )
    if at is None:
        print(f"# {INSTALL[shell]}\n{SCRIPTS[shell]}", end="")
        return
    given = list(words or [])[: at + 1]
    given += [""] * (at + 1 - len(given))
    if shell == "bash":
        given, kept = unbroken(given)
    else:
        kept = ""
    for word, text in candidates(given[1:-1], given[-1]):
        word = word.removeprefix(kept)
        joint = JOINTS[shell]
        escaped = word.replace(":", "\\:") if joint == ":" else word
        print(escaped if joint is None or not text else f"{escaped}{joint}{text}")


def unbroken(words: list[str]) -> tuple[list[str], str]:
    """Undo what bash does to a line: it makes words of ``:`` and ``=``.

    Returns the words, and how much of the last one an answer must leave out.
    """
    found: list[str] = []
    glued = False
    for place, word in enumerate(words):
        if word == "=" and place:
            # The value is a word of its own, perhaps an empty one.
            found += [""] if place == len(words) - 1 else []
        elif found and (word == ":" or (glued and word)):
            found[-1] += word
        else:
            found.append(word)
        glued = word == ":"
    last = found[-1]
    cut = len(words) > 1 and ":" in words[-2:]
    return found, last[: last.rfind(":") + 1] if cut else ""


def candidates(before: list[str], current: str) -> list[tuple[str, str]]:
    """Words that may stand after ``before`` and begin as ``current``, each with help.

    None is no mistake: a shell then offers files.
    """
    from inl.cli.app import COMMANDS

    names = [word for word in before if not word.startswith("-")]
    if not names:
        offered = [(name, _summary(command(name))) for name in COMMANDS]
        roots = [("--help", "help"), ("--version", "the version"), ("--debug", "")]
        offered = roots if current.startswith("-") else offered
    elif names[0] not in COMMANDS:
        return []
    else:
        offered = _of_command(command(names[0]), before, current)
    return [(word, text) for word, text in offered if word.startswith(current)]


def command(name: str) -> Any:
    """Import one command, with its parameters as the parser knows them."""
    from inl.cli.app import COMMANDS

    module, _, function = COMMANDS[name].partition(":")
    app = typer.Typer(add_completion=False)
    app.command(name)(getattr(import_module(module), function))
    return get_command(app)


def _of_command(found: Any, before: list[str], current: str) -> list[tuple[str, str]]:
    by_option = {opt: param for param in found.params for opt in param.opts}
    owner = by_option.get(before[-1]) if before else None
    if owner is not None and not owner.is_flag:
        return [(value, "") for value in _values(owner.name)]
    if current.startswith("-"):
        return [
            (opt, (getattr(param, "help", None) or "").split(". ")[0].rstrip("."))
            for opt, param in by_option.items()
            if opt.startswith("--") and not param.hidden
        ] + [("--help", "help")]
    positional = [
        each.name for each in found.params if each.param_type_name == "argument"
    ]
    return [(value, "") for value in _values(positional[0] if positional else "")]


def _values(name: str) -> list[str]:
    if name == "device":
        return _devices()
    if name == "dtype":
        return ["auto", *FLOATS]
    if name == "shell":
        return list(SCRIPTS)
    if name == "op":
        import inl.ops
        from inl.spec.op import CATALOG

        assert inl.ops, "importing it fills the catalog"
        return sorted(CATALOG)
    return []


def _devices() -> list[str]:
    from inl.plugin import registry

    rows = [row for row in registry().devices() if row.info is not None]
    return ["auto", *(f"{row.type}:{row.info.index}" for row in rows if row.info)]


def _summary(found: Any) -> str:
    return str(found.get_short_help_str(70))
