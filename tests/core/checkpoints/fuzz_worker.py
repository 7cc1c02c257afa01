"""Damages files and reads them, one line of JSON a case; a process of its own.

Run as ``fuzz_worker.py KIND FOLDER FIRST LAST``. What a case did is ``ok``,
``refused`` (an error of ours, with its message) or ``odd`` (anything else).
"""

from __future__ import annotations

import copy
import json
import random
import re
import struct
import sys
import time
import traceback
from pathlib import Path

from inl.errors import InlError

NUMBERS = [
    0,
    1,
    2,
    31,
    33,
    255,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 60,
    (1 << 64) - 1,
]
VALUES = [
    *(None, True, -1, 0, 1, 3, 1.5, 1e308, 1 << 31, 1 << 70, float("nan")),
    *("", "x", "\ud800", "a" * 3000, "(((((", [], {}, [[]], {"": None}, [0] * 300),
]
SNIPPETS = [
    *("{{", "}}", "{%", "%}", "{#", "#}", "(", ")", "[", "]", "'", "|", "~", ".", "-"),
    *(" | tojson", " | string * 99999999", "* 10**9", "| join", "{% raw %}"),
    *("{% for a in range(999999999) %}", "{% for m in messages recursive %}"),
    *("{{ messages.__class__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"),
    *("{{ loop(messages) }}", "{{ namespace(a=1) }}", "{% macro x() %}"),
    *("{% set messages = messages + messages %}", "{{ x.y.z }}", "{{ 1 / 0 }}"),
    *("{{ messages[9] }}", "{% else %}", "{% endfor %}"),
]
WHOLE = [
    *("{{ messages.__class__ }}", "{{ messages.append(1) }}", "{{ 'x' * 10**8 }}"),
    *("{% include 'x' %}", "{% import 'x' as y %}", "{{ x.y.z }}", "{{ 1 / 0 }}"),
    *("{% set messages = messages + messages %}", "{{ messages[9].content }}"),
    *("{% for a in range(10**9) %}{% endfor %}", "{{ '%99999d' % 1 }}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ self._reference }}"),
    *("{% set ns = namespace(a=1) %}{% set ns.a = ns %}{{ ns.a.a }}", "{{ 9**9**9 }}"),
    *("{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ cycler() }}"),
    *("{{ messages | tojson }}", "{{ 'a'.format }}", "{{ '{0.__class__}'.format(1) }}"),
    *("{{ [] | first | upper }}", "{{ messages[0] }}", "{{ messages | length }}"),
]
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TIMES = (1, 1, 1, 2, 3)
TEXTS = ["", "abc aba <s>", "naïve 日本 🙂\n\n 12", "\x00"]
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def damaged(raw, rng, head):
    """A few flips, cuts, splices or false lengths, mostly in the header."""
    raw = bytearray(raw)
    for _ in range(rng.choice(TIMES)):
        reach = min(len(raw), head) if rng.random() < 0.9 else len(raw)
        at = rng.randrange(max(reach, 1))
        kind = rng.randrange(5)
        if kind == 0 and raw:
            raw[min(at, len(raw) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[at:]
        elif kind == 2:
            del raw[at : at + rng.randint(1, 16)]
        elif kind == 3:
            start = rng.randrange(max(reach, 1))
            raw[at:at] = raw[start : start + rng.randint(1, 64)]
        else:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
    return bytes(raw)


def place(node, rng):
    """A place in a JSON value, found by walking down from the top."""
    at = ()
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(keys)
        at, node = (*at, key), node[key]
        if rng.random() < 0.3:
            break
    return at


def changed(node, rng):
    """Some places of a JSON value dropped, doubled, or given another value."""
    for _ in range(rng.choice(TIMES)):
        at = place(node, rng)
        if not at:
            return copy.deepcopy(rng.choice(VALUES))
        inside = node
        for key in at[:-1]:
            inside = inside[key]
        kind = rng.randrange(4)
        if kind == 0:
            del inside[at[-1]]
        elif kind == 1 and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[at[-1]]))
        elif kind == 1:
            inside[rng.choice(list(inside))] = copy.deepcopy(inside[at[-1]])
        else:
            inside[at[-1]] = copy.deepcopy(rng.choice(VALUES))
    return node


def damaged_json(raw, rng):
    """A JSON text with other values, or with other bytes."""
    if rng.random() < 0.3:
        return damaged(raw, rng, len(raw))
    text = json.dumps(changed(json.loads(raw), rng))
    return text.encode("utf-8", "surrogatepass")


def damaged_text(text, rng):
    """A template with parts left out, doubled, exchanged, or put in."""
    for _ in range(rng.choice(TIMES)):
        at = rng.randrange(len(text))
        to = at + rng.randint(1, 12)
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:to] + text[at:]
        elif kind == 2:
            text = text[:at] + text[at:to][::-1] + text[to:]
        elif kind == 3:
            text = text[:at] + rng.choice(SNIPPETS) + text[at:]
        else:
            tags = [one.start() for one in re.finditer(r"\{[{%]", text)]
            at = rng.choice(tags or [0])
            slow = rng.random() < 0.005
            text = text[:at] + (SLOW if slow else rng.choice(WHOLE)) + text[at:]
    return text


class Case:
    """What a kind of file begins as, how it is damaged, and what reads it."""

    def __init__(self, folder):
        self.folder = folder

    def prepare(self, rng):
        """Write the damaged file; return its size."""
        raw = self.damage(self.whole, rng)
        self.path.write_bytes(raw)
        return len(raw)


class Gguf(Case):
    def __init__(self, folder):
        super().__init__(folder)
        self.path = folder / "tiny.gguf"
        self.whole = self.path.read_bytes()

    def damage(self, raw, rng):
        return damaged(raw, rng, 6000)

    def read(self):
        from inl.checkpoints.blocks.dtypes import dequantize
        from inl.executor.model_loader import open_model

        checkpoint = open_model(self.path).checkpoint
        for name in checkpoint.names():
            dequantize(checkpoint.tensor(name), name)
        use_tokenizer(checkpoint.tokenizer())
        _ = checkpoint.chat_template
        checkpoint.close()


class Safetensors(Case):
    def __init__(self, folder):
        super().__init__(folder)
        self.path = folder / "model.safetensors"
        self.whole = self.path.read_bytes()

    def damage(self, raw, rng):
        return damaged(raw, rng, 3000)

    def read(self):
        from inl.checkpoints.blocks.dtypes import dequantize
        from inl.executor.model_loader import open_model

        checkpoint = open_model(self.folder).checkpoint
        for name in checkpoint.names():
            dequantize(checkpoint.tensor(name), name)
        _ = checkpoint.chat_template
        checkpoint.close()


class Config(Safetensors):
    """config.json, and now and then another JSON file beside it."""

    NAMES = ("config.json", "config.json", "generation_config.json",
             "tokenizer_config.json", "model.safetensors.index.json")  # fmt: skip

    def __init__(self, folder):
        super().__init__(folder)
        self.texts = {name: (folder / name).read_bytes() for name in self.NAMES}

    def prepare(self, rng):
        for name, raw in self.texts.items():
            (self.folder / name).write_bytes(raw)
        self.path = self.folder / rng.choice(self.NAMES)
        self.whole = self.texts[self.path.name]
        return super().prepare(rng)

    def damage(self, raw, rng):
        return damaged_json(raw, rng)


class Tokenizer(Case):
    """tokenizer.json of two kinds, and the metadata of GGUF."""

    def __init__(self, folder):
        super().__init__(folder)
        names = ("bytes.json", "pieces.json")
        self.files = [(folder / name).read_bytes() for name in names]
        self.metadata = json.loads((folder / "metadata.json").read_text())
        self.path = folder / "tokenizer.json"

    def prepare(self, rng):
        self.given = None
        if rng.random() < 0.4:
            self.given = changed(json.loads(json.dumps(rng.choice(self.metadata))), rng)
            return len(json.dumps(self.given))
        self.whole = rng.choice(self.files)
        return super().prepare(rng)

    def damage(self, raw, rng):
        return damaged_json(raw, rng)

    def read(self):
        from inl.checkpoints.files.tokenizer_file import build_tokenizer
        from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer

        if self.given is None:
            return use_tokenizer(
                build_tokenizer(self.path.read_bytes(), str(self.path))
            )
        metadata = self.given if isinstance(self.given, dict) else {}
        if len(metadata) % 2:
            return use_tokenizer(open_tokenizer(metadata, "fuzz.gguf"))
        return use_tokenizer(read_tokenizer(metadata, "fuzz.gguf"))


class Template(Case):
    """Compiled and rendered as in the sandbox, which is this process here."""

    def __init__(self, folder):
        super().__init__(folder)
        self.sources = json.loads((folder / "templates.json").read_text())

    def prepare(self, rng):
        self.source = damaged_text(rng.choice(self.sources), rng)
        return len(self.source)

    def read(self):
        from inl.bounded_child import limit_address_space
        from inl.text.sandbox import MAX_MEMORY, Session

        session = Session()
        limit_address_space(MAX_MEMORY)
        variables = {
            "messages": MESSAGES,
            "add_generation_prompt": True,
            "bos_token": "",
        }
        for work, given in (
            (session.compile, self.source),
            (session.render, variables),
        ):
            reply = json.loads(session.answer(work, given))
            if "error" in reply:
                raise InlError(f"chat template, line {reply['line']}: {reply['error']}")


def use_tokenizer(tokenizer):
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text))
    tokenizer.decode([0, 1, 5, 10**6])
    _ = tokenizer.special_ids, tokenizer.byte_level, tokenizer.vocab_size
    for index in range(6):
        tokenizer.token_bytes(index)
        tokenizer.is_byte(index)


def memory(field):
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def forget_peak():
    """Let the system count this process's peak of memory from now on."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def run(case, number):
    rng = random.Random(number)
    size = case.prepare(rng)
    forget_peak()
    before, began = memory("VmRSS"), time.process_time()
    result, message = "ok", ""
    try:
        case.read()
    except InlError as error:
        result, message = "refused", f"{type(error).__name__}: {error}"
    except BaseException:
        result, message = "odd", traceback.format_exc()[-1500:]
    return {
        "number": number,
        "result": result,
        "message": message,
        "seconds": time.process_time() - began,
        "grown": max(0, memory("VmHWM") - before),
        "size": size,
    }


def main():
    kind, folder, first, last = sys.argv[1:]
    case = KINDS[kind](Path(folder))
    for number in range(int(first), int(last)):
        print(json.dumps(run(case, number)), flush=True)


KINDS = {
    "gguf": Gguf,
    "safetensors": Safetensors,
    "config": Config,
    "tokenizer": Tokenizer,
    "template": Template,
}

if __name__ == "__main__":
    main()
