"""Numbers that pages state are those of the code.

``STATEMENTS`` has a page, a phrase of it, and what stands in the phrase's braces, taken
from the code. A value that changes fails a test until the page says the new one. So
does a phrase that changes: put the new one into the table.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest

from inl import bounded_json
from inl.callers import frames
from inl.checkpoints.blocks.dtypes import BLOCKS
from inl.checkpoints.files import pickle_reader, tensor_file
from inl.checkpoints.gguf import file as gguf_file
from inl.checkpoints.gguf import header
from inl.checkpoints.hub.resolve import DEFAULT
from inl.cli.app import COMMANDS
from inl.cli.app import import_command as command
from inl.cli.serve_models import BATCH, LARGE_BATCH
from inl.config import DEFAULT_DRAFTS, EngineConfig
from inl.engine.options import make_requests
from inl.errors import RequestError
from inl.executor.model_executor import MAX_ADMISSIONS
from inl.guidance import json_schemas, structural_tags, trial_process
from inl.plugin import frameworks, probe, screening, speed
from inl.scheduling import mixed_steps, plan, request_order, waiting_queue
from inl.scheduling.request import FinishReason
from inl.serve import (
    admission,
    bounded_calls,
    connections,
    conversions,
    dialect,
    gate,
    health,
    http_server,
    model_slot,
    settings,
)  # fmt: skip
from inl.serve.batches import batch_lines, batch_queue, file_store
from inl.serve.frontends import processes
from inl.spec.step import TOP
from inl.speculation import draft_counts, planner
from inl.text import sandbox, tokenizer_bounds, tokenizer_check
from inl.weights.quantize.report import KINDS

ROOT = Path(__file__).parents[2]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ENGINE, SERVER = EngineConfig(), settings.ServerConfig()
REASONS = [reason for reason in get_args(FinishReason) if reason != "error"]
"""Those of a completion: an error is raised."""


def bits(kind):
    """Return the bits of a weight that is quantized while it is loaded."""
    elements, size = BLOCKS[KINDS[kind]]
    return 8 * size / elements


PROJECTS = [
    ROOT / "core",
    *(path.parent for path in ROOT.glob("libs/*/pyproject.toml")),
    *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
]

STATEMENTS = [
    ("generating.md", '`finish_reason` (`"{}"`, `"{}"`, `"{}"` or `"{}"`)', *REASONS),
    ("callers.md", "## Protocol, version {}", frames.VERSION),
    ("callers.md", "32 bits, at most {} MiB", frames.MAX_BYTES / MIB),
    ("checkpoints.md", "at most {:,} tensors", tensor_file.MAX_TENSORS),
    ("checkpoints.md", "{:,} metadata keys", gguf_file.MAX_PAIRS),
    ("checkpoints.md", "{} MiB of metadata", header.MAX_HEADER / MIB),
    (
        "checkpoints.md",
        "a pickle {} instructions",
        {1_000_000: "a million"}[pickle_reader.MAX_INSTRUCTIONS],
    ),
    (
        "checkpoints.md",
        "with {} seconds of processor time and 3 times its size plus {} MiB",
        tokenizer_check.CPU_SECONDS,
        tokenizer_check.OVERHEAD / MIB,
    ),
    ("checkpoints.md", "make over {} bytes of one", tokenizer_bounds.MAX_GROWTH),
    ("engine-config.md", '"int8" ({:g} bits a weight)', bits("int8")),
    ("engine-config.md", "(E4M3, {:g} bits)", bits("fp8")),
    ("engine-config.md", '"int4" ({:g} bits)', bits("int4")),
    ("gpu.md", "| {:g} bits a weight for 16,", bits("fp8")),
    ("gpu.md", "`int4`: {:g} bits a weight", bits("int4")),
    ("index.md", "SmolLM2-135M-Instruct ({:.0f} MB)", DEFAULT.wheel_bytes / 1e6),
    ("cli.md", "Default: {}, on CUDA and ROCm {}.", BATCH, LARGE_BATCH),
    ("gpu.md", "{} by default on CUDA", LARGE_BATCH),
    ("concurrency.md", "by `priority`, -{0} to {0},", request_order.MAX_PRIORITY),
    ("concurrency.md", "a head start of {} arrivals", waiting_queue.HEAD_START),
    ("concurrency.md", "each {:,} tokens of a prompt", waiting_queue.YIELDS),
    ("devices.md", "with prompts have {:,} tokens", mixed_steps.LEAST_BUDGET),
    ("concurrency.md", "in about {} seconds at most", plan.REPEAT_SECONDS),
    ("devices.md", "the list waits {} s", frameworks.PATIENCE_SECONDS),
    ("devices.md", "is measured for {} s, once", speed.SECONDS),
    ("devices.md", "`EngineConfig(worker_seconds={:g})`", ENGINE.worker_seconds),
    ("generating.md", "at most {} seconds of processor", sandbox.SOFT_SECONDS),
    ("generating.md", "most likely ones (0 to {})", TOP),
    ("hooks.md", "a limit of {:g} seconds", screening.LIMIT_SECONDS),
    ("hooks.md", "A probe has {:g} seconds", probe.TIMEOUT_SECONDS),
    ("install.md", "dist/, {} wheels", len(PROJECTS)),
    ("serving.md", "`priority` is -{0} to {0}", request_order.MAX_PRIORITY),
    ("serving.md", "`--max-body`, {} MiB by default", SERVER.max_body_bytes / MIB),
    ("serving.md", "unless `store` is false: the last {} for", SERVER.stored_responses),
    ("serving.md", "of {} MiB together", SERVER.stored_response_bytes / MIB),
    ("serving.md", "All files have up to {} GiB", SERVER.max_file_bytes / GIB),
    ("serving.md", "A batch has up to {:,}", batch_lines.MAX_REQUESTS),
    ("serving.md", "number up to {:,}", file_store.MAX_FILES),
    ("serving.md", "expires after {} hours", batch_queue.WINDOW_SECONDS // 3600),
    ("serving.md", "and together by {} MiB", gate.OPEN_BYTES / MIB),
    ("serving.md", "The bound of {} MiB of bodies", gate.OPEN_BYTES / MIB),
    ("serving.md", "One above {} KiB is decoded", dialect.LARGE / KIB),
    ("serving.md", "accepted up to {} levels deep", bounded_json.MAX_DEPTH),
    ("serving.md", "take up to {} MiB beside", dialect.MAX_MEMORY / MIB),
    ("serving.md", "a queue of {} of their own", bounded_calls.QUEUE),
    ("serving.md", "`count_tokens` have {} threads", {2: "two"}[conversions.RUNNING]),
    ("serving.md", "a step that takes over {:g} s", model_slot.STALL_SECONDS),
    ("serving.md", "waits for up to {}.", {1.0: "a second"}[health.VERDICT_SECONDS]),
    (
        "serving.md",
        "whose workers were lost {} times",
        {3: "three"}[model_slot.LOST_TESTS],
    ),
    (
        "serving.md",
        "next request, {} times within {} minutes",
        {3: "three"}[model_slot.MOST_RELOADS],
        {120.0: "two"}[model_slot.RELOAD_SECONDS],
    ),
    ("serving.md", "does not reply for {:g} s, is", SERVER.frontend_seconds),
    (
        "serving.md",
        "| headers and path | {} KiB, {} lines;",
        SERVER.max_header_bytes / KIB,
        connections.MAX_HEADERS,
    ),
    ("serving.md", "| time of the headers | {:g} s |", SERVER.receive_seconds),
    (
        "serving.md",
        "| body | {} MiB; of all open requests {} MiB |",
        SERVER.max_body_bytes / MIB,
        gate.OPEN_BYTES / MIB,
    ),
    (
        "serving.md",
        "| time of the body | {:g} s, and 1 s for each {} KiB",
        SERVER.receive_seconds,
        settings.BYTES_PER_SECOND / KIB,
    ),
    (
        "serving.md",
        "{} KiB are read and dropped, within {:g} s",
        connections.DRAIN_BYTES / KIB,
        connections.DRAIN_SECONDS,
    ),
    (
        "serving.md",
        "{:g} s without {} KiB/s",
        SERVER.send_seconds,
        settings.BYTES_PER_SECOND / KIB,
    ),
    ("serving.md", "without a request | {:g} s |", SERVER.idle_seconds),
    (
        "serving.md",
        "| {:,}; where fewer files may be open, that number less {:,}",
        http_server.MAX_CONNECTIONS,
        http_server.BACKLOG + http_server.OTHER_FILES,
    ),
    ("serving.md", "| pipelined requests | {} |", connections.MAX_PIPELINED),
    (
        "serving.md",
        "| reply of a front-end | {:g} s, {:g} s at its start |",
        SERVER.frontend_seconds,
        processes.START_SECONDS,
    ),
    ("serving.md", "limit of open files to {:,}", http_server.MAX_OPEN_FILES),
    ("serving.md", "`Retry-After: {}`", admission.ASLEEP_RETRY_SECONDS),
    ("speculation.md", "per sequence and step ({} by default)", DEFAULT_DRAFTS),
    ("speculation.md", "at least {:.0f} % faster", 100 * draft_counts.GAIN - 100),
    ("speculation.md", "of which at most {} tokens count", planner.HORIZON),
    (
        "structured-output.md",
        "`EngineConfig.max_grammar_bytes`, {} MiB",
        ENGINE.max_grammar_bytes / MIB,
    ),
    (
        "structured-output.md",
        "{} of processor time, {} MiB of memory and {} MiB of stack",
        {1.0: "one second"}[trial_process.CPU_SECONDS],
        trial_process.MEMORY / MIB,
        trial_process.STACK / MIB,
    ),
    (
        "structured-output.md",
        "{:,} levels, {:,} definitions, {:,} properties and {:,} values of "
        "enumerations, a choice {:,} strings, a structural tag {:,} structures",
        json_schemas.MAX_DEPTH,
        json_schemas.MAX_DEFINITIONS,
        json_schemas.MAX_PROPERTIES,
        json_schemas.MAX_CHOICES,
        json_schemas.MAX_CHOICES,
        structural_tags.MAX_COUNT,
    ),
    ("writing-a-backend.md", "n is 1 or {0}, padded", MAX_ADMISSIONS),
    ("writing-a-backend.md", "any number up to {}", MAX_ADMISSIONS),
]


def page(name):
    return " ".join((ROOT / "docs" / name).read_text("utf-8").split())


def phrase(text, values):
    """Fill the braces; a whole number has no fraction, also if it was divided."""
    whole = (
        int(value) if isinstance(value, float) and value == int(value) else value
        for value in values
    )
    return text.format(*whole)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [(name, text, values) for name, text, *values in STATEMENTS],
    ids=[f"{name}: {text}" for name, text, *_ in STATEMENTS],
)
def test_a_page_states_the_value_of_the_code(name, text, values):
    assert phrase(text, values) in page(name)


def test_the_error_on_the_page_of_callers_is_that_of_the_engine():
    with pytest.raises(RequestError) as found:
        make_requests([1], {"max_tokens": -1}, room=9)
    assert f"`inl: RequestError: {found.value}`" in page("callers.md")


def test_the_command_line_brings_what_names_of_hugging_face_need():
    (package,) = re.findall(r"need `([\w-]+)`, which `inl-core\[cli\]`", page("cli.md"))
    assert f"needs `{package}`, which `inl-core[cli]` installs" in page(
        "checkpoints.md"
    )
    lines = metadata.requires("inl-core")
    (text,) = [line for line in lines if re.fullmatch(r'inl-core\[text\].*"cli"', line)]
    assert any(re.match(r'tokenizers.*"text"', line) for line in lines), text
    brought = [line for line in metadata.requires("tokenizers") if "extra" not in line]
    assert any(re.match(rf"{package}\b", line) for line in brought)


def test_another_value_is_found():
    for name, text, *values in STATEMENTS:
        others = [f"{each}?" if isinstance(each, str) else each + 1 for each in values]
        assert phrase(text, others) not in page(name)


def stated(name, option):
    """Return what cli.md says is the default of an option; None if it refers."""
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    section = text.partition(f"\n## inl {name}\n")[2].partition("\n## ")[0]
    row = re.search(rf"^\| `{option}[ `].*\| (.*) \|$", section, re.M)[1]
    if row.startswith("As [`inl"):
        return None
    return row.partition("Default: ")[2].removesuffix(".").strip("`")


def defaults():
    for name in COMMANDS:
        for param in command(name).params:
            is_option = param.param_type_name == "option"
            # None and an empty text are explained in words; a flag is off.
            if is_option and (param.default or type(param.default) in (int, float)):
                yield name, max(param.opts, key=len), param.default


@pytest.mark.parametrize(
    ("name", "option", "default"),
    list(defaults()),
    ids=lambda each: str(each),
)
def test_a_default_of_the_command_line_is_on_the_page(name, option, default):
    said = stated(name, option)
    if said is None:
        return
    said = said.partition("`")[0]  # words may follow
    if isinstance(default, float):
        assert float(said) == default
    else:
        assert said == ("on" if default is True else str(default))


def test_most_defaults_are_compared():
    assert len(list(defaults())) > 80
    assert stated("serve", "--port") == "8000"
