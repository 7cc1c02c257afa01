"""Fields of a config, with a record of those that a model has read.

A field that no model reads and that is not on a list of fields without effect is
named in a warning; one that changes results in a way that no model implements is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError

WITHOUT_EFFECT: Final = frozenset({
    # Names and versions of the files.
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype",
    "auto_map", "name_or_path", "quantization_config", "unsloth_version",
    "unsloth_fixed", "use_unsloth", "model_name", "transformers.js_config",
    # Token ids, for callers.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "eod_token_id",
    "decoder_start_token_id", "tokenizer_class", "prefix", "task_specific_params",
    # Training, and how modules of transformers are called.
    "initializer_range", "use_cache", "return_dict", "output_hidden_states",
    "output_attentions", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "attention_dropout", "attn_dropout", "resid_pdrop",
    "attn_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout",
    "hidden_dropout",
    "classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "pretraining_tp", "chunk_size_feed_forward", "torchscript",
    "use_bfloat16", "attn_implementation", "experts_implementation", "use_return_dict",
    "gradient_checkpointing", "cache_implementation", "cache_config",
    "initializer_factor", "aux_loss_alpha", "seq_aux", "ep_size", "use_mamba_kernels",
    "tie_last_hidden_states", "keys_to_ignore_at_inference", "expert_capacity",
    "mamba_ssm_dtype", "initializer_cutoff_factor", "mlp_dropout", "sparse_prediction",
    "sparse_pred_ignore_index", "deterministic_flash_attn", "reference_compile",
    "repad_logits_with_grad",
    # Layers that predict further tokens, which the tensors' names tell.
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "num_nextn_predict_layers", "num_mtp_layers",
    # Classification heads and encoders, which causal models do not have.
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "decoder_bias", "cls_token_id",
    "is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder",
    "cross_attention_hidden_size", "pruned_heads", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # Sampling defaults, which configs of old versions have.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty",
})  # fmt: skip
"""Fields that do not change the logits of a causal model in transformers."""

REFUSED: Final = ("per_layer_config",)
"""Fields that change the results of every family, which must have read them."""


@final
class Fields(Mapping[str, Any]):
    """Config fields that record which of them are read."""

    def __init__(self, values: Mapping[str, Any], parent: Fields | None = None) -> None:
        self._values = dict(values)
        self._read: set[str] = parent._read if parent else set()
        self.ignored: dict[str, None] = parent.ignored if parent else {}
        """Parts of fields that are not read, in order."""

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self._read.add(name)
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def changed(self, values: Mapping[str, Any]) -> Fields:
        """Return the fields with other values, and the same record."""
        return Fields({**self._values, **values}, self)

    def unread(self) -> list[str]:
        """Return the fields that were not read and may have an effect."""
        return [
            name
            for name in self._values
            if name not in self._read
            and name not in WITHOUT_EFFECT
            and not name.startswith("_")
        ] + list(self.ignored)


def changed(hf: Mapping[str, Any], **values: Any) -> Fields:
    """Return a config with other values of some fields."""
    fields = hf if isinstance(hf, Fields) else Fields(hf)
    return fields.changed(values)


def with_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    """Return a config with a family's defaults of fields that are absent."""
    fields = hf if isinstance(hf, Fields) else Fields(hf)
    given = set(fields)  # unlike "in", this does not record a read
    absent = {name: value for name, value in defaults.items() if name not in given}
    return fields.changed(absent)


def refuse_fields(hf: Fields) -> None:
    """Raise :class:`CheckpointError` for a field that the family does not implement."""
    for name in {*REFUSED} & {*hf.unread()}:
        if hf.get(name):
            raise CheckpointError(
                f"config field {name!r}: found {show(hf[name])}, accepted: null"
            )
