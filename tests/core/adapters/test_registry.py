"""LoRA adapters in an engine: several in one batch, loaded while it serves."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from inl import EngineConfig, InferenceEngine
from inl.adapters.folder import CONFIG
from inl.adapters.folder import TENSORS as WEIGHTS
from inl.errors import CheckpointError, RequestError, WeightMismatch, WorkerLost
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.spec.step import Bucket
from inl.testing.near_tie import BOUNDS
from inl.testing.tiny import MemoryCheckpoint, plain_logits, tiny_llama
from lora_files import LoraFiles

HF, TENSORS = tiny_llama(np.random.default_rng(7))
COUNT = 8
PROMPT = [5, 9, 40, 2, 77, 31, 8, 8, 60, 12, 3, 90, 44, 21, 17, 66, 5, 2, 9, 70]
"""More than a block, so that prefixes can be shared."""


def language():
    return LanguageModel(MODEL, MODEL.config(HF), MemoryCheckpoint(HF, TENSORS))


def engine(backend="reference", **settings):
    config = EngineConfig(
        backend=backend, dtype="float32", context=96, sampling="greedy", **settings
    )
    return InferenceEngine(language(), config=config)


def check(prompt, answer, tensors):
    """Each token has the largest logit of the model with merged weights."""
    logits = plain_logits(HF, tensors, [*prompt, *answer])[len(prompt) - 1 : -1]
    gaps = logits.max(-1) - logits[np.arange(len(answer)), list(answer)]
    assert gaps.max() < BOUNDS["float32"], gaps


@pytest.fixture
def files(tmp_path):
    """Adapters of different ranks, scales and layers, and their folders."""
    made = {
        "one": LoraFiles(TENSORS, seed=1),
        "two": LoraFiles(TENSORS, seed=2, rank=2, rs=True, alpha=3.0),
        "few": LoraFiles(TENSORS, seed=3, rank=1, targets=("q", "down")),
    }
    return {name: (each, each.write(tmp_path / name)) for name, each in made.items()}


def paths(files):
    return {name: folder for name, (_, folder) in files.items()}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_several_adapters_and_the_base_share_a_batch(backend, files):
    if backend == "cpu":
        pytest.importorskip("inl_cpu")
    with engine(backend, adapters=paths(files), max_adapter_rank=4) as e:
        names = [None, "one", "two", "few", None, "two"]
        for prompt in (PROMPT, PROMPT[:3]):  # chunked prefill and decoding together
            handles = [
                e.submit(prompt, max_tokens=COUNT, adapter=name) for name in names
            ]
            while not all(handle.completed for handle in handles):
                e.step()
            answers = [handle.completion().token_ids for handle in handles]
            for name, answer in zip(names, answers, strict=True):
                merged = files[name][0].merged(TENSORS) if name else TENSORS
                check(prompt, answer, merged)
            assert len(set(answers)) == 4, "each adapter changes the answer"


def test_a_prefix_is_shared_within_an_adapter_only(files):
    with engine(adapters=paths(files), max_adapter_rank=4) as e:
        first = e.generate(PROMPT, max_tokens=COUNT, adapter="one")
        hits = e.stats.prefix_hit_tokens
        for name in (None, "two", "few"):
            e.generate(PROMPT, max_tokens=COUNT, adapter=name)
        assert e.stats.prefix_hit_tokens == hits
        again = e.generate(PROMPT, max_tokens=COUNT, adapter="one")
        assert e.stats.prefix_hit_tokens > hits
        assert again.token_ids == first.token_ids


def test_adapters_are_loaded_and_unloaded_while_requests_run(files):
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        plain = e.generate(PROMPT, max_tokens=COUNT)
        check(PROMPT, plain.token_ids, TENSORS)
        e.load_adapter("one", files["one"][1])
        handle = e.submit(PROMPT, max_tokens=COUNT, adapter="one")
        e.step()
        e.unload_adapter("one")
        with pytest.raises(RequestError, match=r"adapter: found 'one', accepts None"):
            e.generate(PROMPT, adapter="one")
        with pytest.raises(
            RequestError, match=r"'two'.*that were unloaded still serve"
        ):
            e.load_adapter("two", files["two"][1])
        while not handle.completed:
            e.step()
        check(PROMPT, handle.completion().token_ids, files["one"][0].merged(TENSORS))
        e.load_adapter("two", files["two"][1])
        answer = e.generate(PROMPT, max_tokens=COUNT, adapter="two")
        check(PROMPT, answer.token_ids, files["two"][0].merged(TENSORS))
        assert e.generate(PROMPT, max_tokens=COUNT).token_ids == plain.token_ids
        assert e.adapters == ("two",)


def test_a_call_keeps_the_adapter_that_it_has_found(files):
    """Also before its requests are queued, and for each of its prompts."""
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        e.load_adapter("one", files["one"][1])
        use = e.use_adapter("one")
        e.unload_adapter("one")
        with pytest.raises(RequestError, match="1 that were unloaded still serve"):
            e.load_adapter("one", files["two"][1])
        for prompt in (PROMPT, PROMPT[:3]):
            handle = e.start(prompt, listener=None, adapter_use=use, max_tokens=COUNT)
            while not handle.completed:
                e.step()
            answer = handle.completion().token_ids
            check(prompt, answer, files["one"][0].merged(TENSORS))
        del use
        e.load_adapter("one", files["two"][1])  # the finished handle keeps nothing
        answer = e.generate(PROMPT, max_tokens=COUNT, adapter="one").token_ids
        check(PROMPT, answer, files["two"][0].merged(TENSORS))


@pytest.mark.parametrize("end", ["drop", "cancel"])
def test_a_call_that_is_not_made_keeps_nothing(files, end):
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        e.load_adapter("one", files["one"][1])
        handle = e._prepare(PROMPT, e.use_adapter("one"), max_tokens=2)
        e.unload_adapter("one")
        with pytest.raises(RequestError, match="still serve requests"):
            e.load_adapter("two", files["two"][1])
        if end == "cancel":
            e.cancel(handle)
        else:
            del handle
        e.load_adapter("two", files["two"][1])


def test_all_prompts_of_a_call_use_one_adapter(files, monkeypatch):
    """Another one gets the name while the prompts are encoded."""
    with engine(max_adapters=2, max_adapter_rank=4) as e:
        e.load_adapter("one", files["one"][1])
        prepare, count = e._encoder.prepare, []

        def change(*arguments, **options):
            if count:
                e.unload_adapter("one")
                e.load_adapter("one", files["two"][1])
            count.append(0)
            return prepare(*arguments, **options)

        monkeypatch.setattr(e._encoder, "prepare", change)
        prompts = [PROMPT, PROMPT[:3]]
        answers = e.generate(prompts, max_tokens=COUNT, adapter="one")
        for prompt, answer in zip(prompts, answers, strict=True):
            check(prompt, answer.token_ids, files["one"][0].merged(TENSORS))


def test_a_request_of_a_replaced_adapter_is_refused(files):
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        e.load_adapter("one", files["one"][1])
        stale = e._prepare(PROMPT, e.use_adapter("one"), max_tokens=2)
        stale.request.adapter_digest = "0" * 64
        with pytest.raises(RequestError, match=r"number 1 .* has been replaced"):
            e._dispatcher.submit(stale)


def test_without_room_for_adapters_programs_have_none(files):
    with engine() as e:
        assert "lora" not in e.runner.executor.tracer(Bucket(1, 1)).choices
        with pytest.raises(RequestError, match=r"EngineConfig\(max_adapters=1\)"):
            e.load_adapter("one", files["one"][1])
        with pytest.raises(RequestError, match="since no adapter is loaded"):
            e.generate(PROMPT, adapter="one")


def test_names_are_checked(files):
    with engine(adapters={"one": files["one"][1]}, max_adapters=2) as e:
        with pytest.raises(RequestError, match="'one': is loaded already, from"):
            e.load_adapter("one", files["two"][1])
        with pytest.raises(RequestError, match="adapter: found '', accepts None or"):
            e.load_adapter("", files["two"][1])
        with pytest.raises(RequestError, match="adapter: found 3, accepts None or"):
            e.generate(PROMPT, adapter=3)
        with pytest.raises(RequestError, match="found 'two', accepts one"):
            e.unload_adapter("two")


def test_a_folder_that_changes_after_it_was_checked_is_refused(files, monkeypatch):
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        one, folder = files["one"]
        load = e.core.load_adapter

        def change(source):
            one.config["lora_alpha"] = 1.0
            one.write(folder)
            load(source)

        monkeypatch.setattr(e.core, "load_adapter", change)
        with pytest.raises(CheckpointError, match="it has changed meanwhile"):
            e.load_adapter("one", folder)
        assert e.adapters == ()
        check(PROMPT, e.generate(PROMPT, max_tokens=2).token_ids, TENSORS)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("step", ["before its check", "behind its check"])
def test_a_folder_that_is_deleted_while_it_is_loaded_is_refused(
    files, monkeypatch, name, step
):
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        one, folder = files["one"]
        load = e.core.load_adapter

        def delete(source):
            (folder / name).unlink()
            load(source)

        if step == "before its check":
            (folder / name).unlink()
        else:
            monkeypatch.setattr(e.core, "load_adapter", delete)
        with pytest.raises(CheckpointError, match=f"{name}.*missing"):
            e.load_adapter("one", folder)
        monkeypatch.undo()
        assert e.adapters == ()
        check(PROMPT, e.generate(PROMPT, max_tokens=2).token_ids, TENSORS)
        one.write(folder)
        e.load_adapter("one", folder)
        answer = e.generate(PROMPT, max_tokens=2, adapter="one").token_ids
        check(PROMPT, answer, one.merged(TENSORS))


def test_a_loaded_adapter_needs_its_folder_no_more(files):
    with engine(max_adapters=1, max_adapter_rank=4) as e:
        one, folder = files["one"]
        e.load_adapter("one", folder)
        handle = e.submit(PROMPT, max_tokens=COUNT, adapter="one")
        e.step()
        shutil.rmtree(folder)
        answer = e.generate(PROMPT, max_tokens=COUNT, adapter="one").token_ids
        assert handle.completion().token_ids == answer
        check(PROMPT, answer, one.merged(TENSORS))


def test_a_lost_worker_loses_adapters_whose_folders_are_gone_and_no_others(
    files, monkeypatch, caplog
):
    with engine(max_adapters=2, max_adapter_rank=4) as e:
        e.core._replace = lambda _: e._restart()
        for name in ("one", "two"):
            e.load_adapter(name, files[name][1])
        base, gone, kept = (
            e.submit(PROMPT, max_tokens=COUNT, adapter=name)
            for name in (None, "one", "two")
        )
        e.step()
        shutil.rmtree(files["one"][1])

        def lose(_):
            raise WorkerLost("killed")

        monkeypatch.setattr(e.runner, "submit", lose)
        while not (base.completed and gone.completed and kept.completed):
            e.step()
        assert e.core.restarts == 1
        assert e.core.failure is None
        with pytest.raises(RequestError, match="adapter: number 1 is not loaded"):
            gone.completion()
        check(PROMPT, base.completion().token_ids, TENSORS)
        check(PROMPT, kept.completion().token_ids, files["two"][0].merged(TENSORS))
        assert e.adapters == ("two",)
        assert "adapter one: was unloaded with a lost worker" in caplog.text
        with pytest.raises(RequestError, match="adapter: found 'one', accepts two"):
            e.generate(PROMPT, adapter="one")
        e.load_adapter("few", files["few"][1])  # in the place that is free
        answer = e.generate(PROMPT, max_tokens=2, adapter="few").token_ids
        check(PROMPT, answer, files["few"][0].merged(TENSORS))


def test_an_adapter_of_another_model_is_refused_at_the_start(tmp_path):
    _, other = tiny_llama(np.random.default_rng(1), hidden=56)
    folder = LoraFiles(other, seed=1).write(tmp_path / "other")
    with pytest.raises(WeightMismatch, match=r"lora_B.*found \[56, 4\].*\[48, 4\]"):
        engine(adapters={"other": folder})
