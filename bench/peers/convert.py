"""One GGUF file in the formats of the peers; runs in the environment for converting.

    python convert.py KIND SOURCE TARGET

KIND is ``facts`` (vocabulary and the question's tokens, as JSON), ``text`` (tokens of
a JSON file back to text), ``hugging-face`` (a folder in float32), ``gguf:Q8_0`` and the
like, ``onnx:int4`` or ``ctranslate2:int8``. The last two start from the folder and
leave the work to the peer's own converter.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

QUESTION = "The capital of France is"
ANSWER_TOKENS = 12
READ_BYTES = "weight_bytes.json"
"""File beside a converted model: bytes of weights that a token reads."""


def facts(source: Path, target: Path) -> None:
    """Write what the drivers need to know, and a float32 answer to judge theirs by."""
    import torch

    tokenizer, model = _tokenizer(source), _model(source)
    ids = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        likeliest = model(ids).logits[0, -1].topk(10).indices.tolist()
        mask = torch.ones_like(ids)
        said = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=ANSWER_TOKENS,
            max_new_tokens=ANSWER_TOKENS,
        )
    found = {
        "name": source.name,
        "vocabulary": model.config.vocab_size,
        "question": QUESTION,
        "question_ids": ids[0].tolist(),
        "likeliest": likeliest,
        "answer": said[0, ids.shape[1] :].tolist(),
        "weight_bytes": gguf_weight_bytes(source),
    }
    target.write_text(json.dumps(found), "utf-8")


def text(source: Path, target: Path) -> None:
    """Replace a JSON list of answers in tokens by their texts."""
    tokenizer = _tokenizer(source)
    answers = json.loads(target.read_text("utf-8"))
    target.write_text(json.dumps([tokenizer.decode(ids) for ids in answers]), "utf-8")


def hugging_face(source: Path, target: Path) -> None:
    """Dequantize to float32, by transformers' own reading of the format."""
    import torch
    from transformers import AutoModelForCausalLM

    read = _model(source)
    config = read.config
    # A model that knows it came from GGUF refuses to be saved.
    del config.quantization_config
    clean = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    clean.load_state_dict(read.state_dict())
    clean.tie_weights()
    clean.save_pretrained(target)
    _tokenizer(source).save_pretrained(target)


def gguf(source: Path, target: Path, kind: str) -> None:
    """Quantize every matrix anew; in 4- and 8-bit files the table keeps its bits."""
    import gguf as package

    wanted = package.GGMLQuantizationType[kind]
    target.mkdir(parents=True, exist_ok=True)
    reader = package.GGUFReader(source)
    writer = package.GGUFWriter(target / f"model-{kind}.gguf", _architecture(reader))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            _copy(writer, field, wanted)
    for tensor in reader.tensors:
        data, raw = tensor.data, tensor.tensor_type
        narrow = wanted not in (package.GGMLQuantizationType.F16, _bf16())
        keep = len(tensor.shape) == 1 or (narrow and _is_table(tensor.name))
        if not keep:
            data = package.quantize(package.dequantize(data, raw), wanted)
            raw = wanted
        writer.add_tensor(tensor.name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _note(target, gguf_weight_bytes(target / f"model-{kind}.gguf"))


def gguf_weight_bytes(path: Path) -> int:
    """Bytes of all tensors but an embedding that is not the output's table too."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor.n_bytes for tensor in GGUFReader(path).tensors}
    table = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return int(sum(tensors.values()) - table)


def onnx(source: Path, target: Path, kind: str) -> None:
    """Run the builder of onnxruntime-genai for the CPU provider.

    Accuracy level 4 is its fast path, int8 activations; the blocks are as long as the
    source's own. The head becomes 4 bits too: asked for 8, the builder of 0.18 makes a
    tied model that does not load, and an untied one that answers nonsense.
    """
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(source), "-o", str(target), "-p", kind, "-e", "cpu"]
    command += ["-c", str(target / "cache")]
    options = ["block_size=32", "accuracy_level=4"]
    subprocess.run([*command, "--extra_options", *options], check=True)
    shutil.rmtree(target / "cache", ignore_errors=True)
    _note(target, _onnx_weight_bytes(target / "model.onnx"))


def _onnx_weight_bytes(path: Path) -> int:
    """Bytes of the weights, without those that are only looked up by row."""
    import onnx_ir

    graph = onnx_ir.load(path).graph
    return sum(
        value.const_value.nbytes
        for value in graph.initializers.values()
        if any("Gather" not in node.op_type for node, _ in value.uses())
    )


def ctranslate2(source: Path, target: Path, kind: str) -> None:
    """Run CTranslate2's converter."""
    command = ["ct2-transformers-converter", "--model", str(source)]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    command += ["--output_dir", str(target), "--quantization", kind, "--force"]
    subprocess.run(command, check=True)
    _note(target, (target / "model.bin").stat().st_size)


def _model(source: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )


def _tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


def _architecture(reader: Any) -> str:
    return str(reader.fields["general.architecture"].contents())


def _bf16() -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType.BF16


def _is_table(name: str) -> bool:
    return name in ("token_embd.weight", "output.weight")


def _copy(writer: Any, field: Any, wanted: Any) -> None:
    """Copy one field of the header; the file's type becomes what is wanted."""
    from gguf import GGUFValueType, LlamaFileType

    if field.name == "general.file_type":
        name = wanted.name if wanted.name.startswith("F") else f"MOSTLY_{wanted.name}"
        names = {"F16": "MOSTLY_F16", "F32": "ALL_F32"}
        writer.add_file_type(int(LlamaFileType[names.get(wanted.name, name)]))
        return
    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def _note(target: Path, weight_bytes: int) -> None:
    (target / READ_BYTES).write_text(json.dumps(weight_bytes), "utf-8")


def main(kind: str, source: Path, target: Path) -> None:
    """Make one thing; a target is complete when this returns."""
    name, _, form = kind.partition(":")
    made = {"gguf": gguf, "onnx": onnx, "ctranslate2": ctranslate2}
    if name in made:
        made[name](source, target, form)
    else:
        plain = {"facts": facts, "text": text, "hugging-face": hugging_face}
        plain[name](source, target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
