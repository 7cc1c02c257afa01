"""Config fields mean what they mean to transformers; none is ignored silently."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import save_file

from inl.errors import CheckpointError, UnknownArchitecture
from inl.executor.model_loader import open_model
from inl.executor.tied_weights import without_copies
from inl.models import deepseek_v3, gemma3, llama, mistral, mixtral, olmo3, qwen3
from inl.models.registry import find_model
from inl.ops.rope import RopeScaling
from inl.testing.tiny import tiny_llama

PLAIN = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}


@pytest.fixture
def folder(tmp_path):
    """Writes a tiny Llama with other config fields and tensors."""

    def write(tensors=None, **fields):
        config, own = tiny_llama(np.random.default_rng(0), vocab=64)
        if fields.get("tie_word_embeddings"):
            del own["lm_head.weight"]
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        save_file(own | (tensors or {}), tmp_path / "model.safetensors")
        return tmp_path, own

    return write


def test_model_type_decides(tmp_path):
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}
    assert find_model(names, tmp_path) is mistral.MODEL
    assert find_model({"architectures": ["LlamaForCausalLM"]}, tmp_path) is llama.MODEL
    with pytest.raises(UnknownArchitecture, match="found 'mamba', 'MambaForCausalLM'"):
        find_model(
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, tmp_path
        )


@pytest.mark.parametrize(
    ("kind", "architecture", "model"),
    [
        ("code_llama", "LlamaForCausalLM", llama.MODEL),
        ("kimi_k2", "DeepseekV3ForCausalLM", deepseek_v3.MODEL),
    ],
)
def test_the_architecture_decides_for_an_unknown_model_type(
    tmp_path, kind, architecture, model
):
    names = {"architectures": [architecture], "model_type": kind}
    assert find_model(names, tmp_path) is model


def test_olmo3_takes_the_fields_of_one_rotation():
    """Layers with a window have the base of the others, without their scaling."""
    kinds = {
        "full_attention": YARN | {"rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    flat = olmo3.config({**PLAIN, "rope_parameters": YARN | {"rope_theta": 500.0}})
    assert flat == olmo3.config({**PLAIN, "rope_parameters": kinds})
    assert flat.local_rope[0] == 500.0


def test_rope_scaling_replaces_rope_parameters_and_raises_the_context():
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config = qwen3.config({**PLAIN, **newer, "rope_scaling": YARN, "rope_theta": 500.0})
    assert config.rope_scaling[:6] == ("yarn", 4.0, 1.0, 32.0, 32, ())
    assert (config.rope_theta, config.max_tokens) == (500.0, 128)
    longer = {**PLAIN, "max_position_embeddings": 4096, "rope_scaling": YARN}
    assert llama.config(longer).max_tokens == 4096


def test_the_theta_that_rope_scaling_drops_is_named(folder, caplog):
    path, _ = folder(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rope_theta=None,
        rope_scaling=YARN,
    )
    assert open_model(path).config.rope_theta == 10000.0
    assert "rope_parameters.rope_theta = 500.0" in caplog.text


def test_the_original_length_of_the_top_level_comes_first():
    for kind in (YARN, {"rope_type": "llama3", "factor": 2.0, ORIGINAL: 8,
                        "low_freq_factor": 1.0, "high_freq_factor": 4.0}):  # fmt: skip
        nested = llama.config({**PLAIN, "rope_scaling": kind})
        assert nested.rope_scaling.original == kind[ORIGINAL]
        both = llama.config({**PLAIN, "rope_scaling": kind, ORIGINAL: 16})
        assert both.rope_scaling.original == 16


@pytest.mark.parametrize("name", ["factor", ORIGINAL])
def test_a_missing_factor_or_length_is_refused(name):
    given = {key: value for key, value in YARN.items() if key != name}
    with pytest.raises(CheckpointError, match=f"'rope_scaling.{name}' is missing"):
        llama.config({**PLAIN, "rope_scaling": given})


def test_yarn_is_read_with_all_of_its_fields():
    given = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}
    scaling = llama.config({**PLAIN, "rope_scaling": given}).rope_scaling
    gain = (1 + 0.07 * np.log(4)) / (1 + 0.05 * np.log(4))
    assert scaling == RopeScaling(
        "yarn", 4.0, 1.0, 32.0, 32, gain=pytest.approx(gain), whole_planes=False
    )


def test_a_tied_model_with_another_projection_uses_it(folder):
    head = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    path, own = folder(tie_word_embeddings=True)
    width = own["model.embed_tokens.weight"].shape[1]
    language = open_model(path)
    head = head[:, :width]
    path, _ = folder({"lm_head.weight": head}, tie_word_embeddings=True)
    with_head = open_model(path)
    tied, separate = (logits_of(each) for each in (language, with_head))
    assert np.array_equal(tied, own["model.embed_tokens.weight"])
    again, _ = folder({"lm_head.weight": head}, tie_word_embeddings=False)
    assert np.allclose(separate, logits_of(open_model(again)))
    assert not np.allclose(tied, separate)


def test_a_copy_of_the_embedding_takes_no_memory(folder):
    path, own = folder(tie_word_embeddings=True)
    table = own["model.embed_tokens.weight"]
    path, _ = folder({"lm_head.weight": table}, tie_word_embeddings=True)
    checkpoint = open_model(path).checkpoint
    assert "lm_head.weight" not in without_copies(checkpoint, tied=True)
    path, _ = folder({"lm_head.weight": 2 * table}, tie_word_embeddings=True)
    assert "lm_head.weight" in without_copies(open_model(path).checkpoint, tied=True)


def logits_of(language):
    """The head's weight, as it is loaded."""
    from inl.backend.reference import ReferenceBackend
    from inl.device import Device
    from inl.weights.load import load_weights, stored_specs
    from inl.weights.plan import plan_weights

    stored = stored_specs(language.checkpoint)
    plan = plan_weights(language.model.weights(language.config), (), stored)
    backend = ReferenceBackend(Device("reference:0"), dtype="float32")
    return load_weights(plan, language.checkpoint, backend, "float32").head.weight


def test_defaults_are_those_of_the_family():
    bare = {name: PLAIN[name] for name in PLAIN if name[:3] != "max"}
    bare |= {"num_attention_heads": 8, "hidden_size": 64}
    window = mistral.config(bare | {"num_key_value_heads": 2})
    assert window.views[0].window == 4096
    assert window.max_tokens == 131072
    del bare["num_key_value_heads"]
    assert mistral.config(bare).kv_heads == 8
    experts = mixtral.config(bare)
    assert (experts.rope_theta, experts.norm_eps) == (1e6, 1e-5)
    assert experts.views[0].window is None


def test_gemma3_has_no_cap_of_scores():
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    config = gemma3.config({**PLAIN, **caps, "sliding_window": 7})
    assert (config.attention_cap, config.logit_cap) == (None, 3.0)


def test_fields_that_are_not_known_are_named(folder, caplog):
    path, _ = folder(
        initializer_range=0.1,  # without effect
        new_norms=True,
        _name_or_path="x",
        rope_scaling={"rope_type": "linear", "factor": 2.0, "of_no_meaning": 1},
    )
    with caplog.at_level(logging.WARNING, "inl"):
        open_model(path)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "not known and ignored: new_norms, rope_scaling.of_no_meaning"
    )


def test_known_fields_are_not_named(folder, caplog):
    open_model(folder()[0])
    assert caplog.text == ""


def test_fields_that_change_every_family_are_refused(folder):
    path, _ = folder(per_layer_config={"0": {"num_attention_heads": 2}})
    with pytest.raises(CheckpointError, match=r"'per_layer_config': found"):
        open_model(path)
