"""Generators of configs and chat templates; see :mod:`structure_cases`."""

from __future__ import annotations

import json

from structure_cases import COUNTS, NESTED, ODD, WORDS, odd, with_nesting

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 127,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [1, 2],
}
ARCHITECTURES = [
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM",
    "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Unknown",
]  # fmt: skip
FIELDS = [
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "sliding_window", "layer_types", "query_pre_attn_scalar", "head_dim",
    "norm_topk_prob", "attn_logit_softcapping", "use_qk_norm", "rope_parameters",
    "mlp_only_layers", "sliding_window_pattern", "decoder_sparse_step",
    "partial_rotary_factor",
]  # fmt: skip
ROPE = ["default", "linear", "llama3", "yarn", "longrope", "dynamic", "x"]


def config_json(rng, valid):
    """A config of a tiny model: other values, fields, families and nesting."""
    config = dict(valid)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        key = rng.choice([*config, *FIELDS])
        config[key] = rng.choice([*ODD, *COUNTS])
    if rng.random() < 0.2:
        config["architectures"] = [rng.choice(ARCHITECTURES)]
        config["num_experts_per_tok"], config["sliding_window"] = 1, 8
        config[rng.choice(["num_local_experts", "num_experts"])] = rng.choice(COUNTS)
    if rng.random() < 0.2:
        config["rope_scaling"] = {
            "rope_type": odd(rng, rng.choice(ROPE)), "factor": odd(rng, 2.0, 0.2),
            "original_max_position_embeddings": rng.choice(COUNTS),
            "attention_factor": odd(rng, 1.0), "beta_fast": odd(rng, 32, 0.2),
            "short_factor": [1.0] * rng.choice([0, 8, 5000]),
            "long_factor": [odd(rng, 1.0)], "low_freq_factor": odd(rng, 1.0, 0.2),
            "high_freq_factor": odd(rng, 4.0, 0.2),
        }  # fmt: skip
    if rng.random() < 0.05:
        config["extra"] = NESTED
    if rng.random() < 0.05:
        config["extra"] = [[]] * rng.choice([10, 20_000])
    if rng.random() < 0.05:
        del config[rng.choice(list(config))]
    return with_nesting(rng, json.dumps(config))


EXPRESSIONS = [
    "m.content", "m['role']", "messages[0].content", "bos_token", "loop.index", "x",
    "1", "'a'", "ns.n", "messages | length", "range(3) | list", "[1, 2]", "{'a': m}",
    "none", "messages[-1]", "m.content.split('a')[0]", "'%d' % 3", "f('b')",
    "2 ** 5", "7 / n",
]  # fmt: skip
FILTERS = [
    "trim", "upper", "lower", "tojson", "length", "list", "join(',')",
    "replace('a','b')", "default('x')", "first", "last", "string", "int",
    "reverse | list", "batch(2) | list", "indent(4)", "center(9)", "select | list",
    "map(attribute='content') | list", "unknown", "format(1)", "attr('x')", "random",
    "sum", "groupby('role') | list",
]  # fmt: skip
WRONG = [
    "m.__class__", "''.__class__.__mro__", "messages.append(1)", "'a' * 10 ** 9",
    "9 ** 9 ** 9", "range(10 ** 9)", "'%99999d' % 1", "self._x", "cycler.__init__",
    "raise_exception('no')", "f(f)", "'{0.__class__}'.format(1)", "(" * 300 + ")" * 300,
]  # fmt: skip
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def expression(rng, depth=0):
    text = rng.choice(WRONG if rng.random() < 0.02 else EXPRESSIONS)
    if rng.random() < 0.3:
        text = f"({text}) | {rng.choice(FILTERS)}"
    if depth < 6 and rng.random() < 0.4:
        sign = rng.choice(["~", "~", "+", "*", "==", "in", "and", "or", "if true else"])
        text = f"({text}) {sign} ({expression(rng, depth + 1)})"
    return text


def body(rng, depth=0):
    """Tags, expressions and text; every block is closed, with few exceptions."""
    parts = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        inner = body(rng, depth + 1) if depth < rng.choice([2, 3, 3, 60]) else "x"
        times = rng.choice(["messages", "messages[::-1]", "range(5)", "range(20000)"])
        parts.append(rng.choice([
            rng.choice(WORDS), f"{{{{ {expression(rng)} }}}}",
            f"{{% for m in {times} %}}{inner}{{% endfor %}}" if depth < 2 else inner,
            f"{{% if {expression(rng)} %}}{inner}{{% else %}}y{{% endif %}}",
            f"{{%- set ns.n = {expression(rng)} -%}}",
            f"{{% set x = {expression(rng)} %}}",
            f"{{% macro f(n) %}}{inner}{{% endmacro %}}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
        ]))  # fmt: skip
        if rng.random() < 0.01:
            parts.append(
                rng.choice(["{% endfor %}", "{{", "{% if %}", "{% include 'x' %}"])
            )
    return "".join(parts)


def template(rng):
    if rng.random() < 0.001:
        return SLOW
    start = "{% set ns = namespace(n=0) %}{% set n = 1 %}{% set m = messages[0] %}"
    source = start + "{% macro f(a) %}[{{ a }}]{% endmacro %}" + body(rng)
    return source * (50 if rng.random() < 0.005 else 1)
