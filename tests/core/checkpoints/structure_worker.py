"""Generates model files and reads them, one line of JSON a case.

Run as ``structure_worker.py FOLDER FIRST LAST``; the kinds take turns. What a case did
is ``ok``, ``refused`` (an error of ours, with its message) or ``odd`` (anything else).
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))

from fuzz_worker import MESSAGES, forget_peak, memory, use_tokenizer

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.files.tensor_file import TensorFile
from inl.checkpoints.files.tokenizer_file import build_tokenizer
from inl.checkpoints.files.torch_file import read_archive
from inl.errors import InlError
from inl.executor.model_loader import open_model
from inl.text.sandbox import Session, limit_memory
from structure_cases import gguf_file, pickle_program, tokenizer_json
from structure_texts import config_json, template


def pickle_case(rng, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", pickle_program(rng))
        archive.writestr("m/data/0", bytes(256))
        archive.writestr("m/data/1", bytes(1024))
    file = TensorFile(path)

    def read():
        for entry in read_archive(file).values():
            file.array(entry)

    return read


def gguf_case(rng, path):
    model = json.loads((path.parent / "gguf.json").read_text())
    tensors = [
        (name, shape, bytes.fromhex(raw)) for name, shape, raw in model["tensors"]
    ]
    path.write_bytes(gguf_file(rng, model["metadata"], tensors))

    def read():
        checkpoint = open_model(path).checkpoint
        for name in checkpoint.names():
            dequantize(checkpoint.tensor(name), name)
        use_tokenizer(checkpoint.tokenizer())
        _ = checkpoint.chat_template
        checkpoint.close()

    return read


def config_case(rng, path):
    valid = json.loads((path.parent / "valid.json").read_text())
    path.write_bytes(config_json(rng, valid))
    return lambda: open_model(path.parent).checkpoint.close()


def tokenizer_case(rng, path):
    path.write_bytes(tokenizer_json(rng))
    return lambda: use_tokenizer(build_tokenizer(path.read_bytes(), str(path)))


def template_case(rng, path):
    source = template(rng)
    path.write_text(source, "utf-8", "surrogatepass")

    def read():
        session = Session()
        limit_memory()
        given = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": ""}
        for work, request in ((session.compile, source), (session.render, given)):
            reply = json.loads(session.answer(work, request))
            if "error" in reply:
                raise InlError(f"{path}, line {reply['line']}: {reply['error']}")

    return read


KINDS = {
    "pickle": (pickle_case, "model.pt"),
    "gguf": (gguf_case, "tiny.gguf"),
    "config": (config_case, "config.json"),
    "tokenizer": (tokenizer_case, "tokenizer.json"),
    "template": (template_case, "chat_template.jinja"),
}


def run(folder, number):
    kind = list(KINDS)[number % len(KINDS)]
    make, file = KINDS[kind]
    path = folder / kind / file
    read = make(random.Random(number), path)
    forget_peak()
    before, began = memory("VmRSS"), time.process_time()
    result, message = "ok", ""
    try:
        read()
    except InlError as error:
        result, message = "refused", f"{type(error).__name__}: {error}"
    except BaseException:
        result, message = "odd", traceback.format_exc()[-1500:]
    return {
        "number": number,
        "kind": kind,
        "result": result,
        "message": message[:6000],
        "seconds": time.process_time() - began,
        "grown": max(0, memory("VmHWM") - before),
        "size": path.stat().st_size,
    }


def main():
    folder, first, last = sys.argv[1:]
    for number in range(int(first), int(last)):
        print(json.dumps(run(Path(folder), number)), flush=True)


if __name__ == "__main__":
    main()
