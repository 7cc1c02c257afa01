"""Fill-in-the-middle prompts of each family, beside its own published form."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from byte_tokens import byte_rules
from inl.errors import PromptTooLong, RequestError
from inl.text.fill_in_middle import fill_ids, fill_tokens
from inl.text.gguf_vocabulary import open_tokenizer, read_tokenizer
from inl.text.tokenizer import Tokenizer

PREFIX, SUFFIX = "def f(a):\n    return ", "\n\nprint(f(1))"
FORMS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "glm": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}


def rules_with(*tokens):
    rules = byte_rules()
    rules.add_special_tokens([*tokens])
    return rules


def filled(rules, files=(), *, context=4096, prefix=PREFIX, **options):
    tokenizer = Tokenizer(rules, **options)
    return fill_ids(tokenizer, prefix, SUFFIX, files, context=context)


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_family_is_its_own_text(name):
    before, after, middle = FORMS[name]
    rules = rules_with(before, after, middle)
    text = f"{before}{PREFIX}{after}{SUFFIX}{middle}"
    assert filled(rules) == rules.encode(text).ids


@pytest.mark.parametrize("frame", ["<s> $A", "<s> $A </s>", "$A </s>"])
def test_a_text_begins_with_the_token_that_every_text_begins_with(frame):
    rules = rules_with("<s>", "</s>", *FORMS["starcoder"])
    pairs = [(name, rules.token_to_id(name)) for name in ("<s>", "</s>")]
    plain = filled(rules)
    rules.post_processor = processors.TemplateProcessing(frame, None, pairs)
    begin = [pairs[0][1]] if frame.startswith("<s>") else []
    assert filled(rules) == [*begin, *plain]


def test_codestral_has_the_suffix_first_and_no_token_of_the_middle():
    rules = rules_with("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
    assert filled(rules) == rules.encode(f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}").ids


def code_llama():
    """A vocabulary of characters that begins each text with a space."""
    pieces = ["<unk>", "▁", *sorted(set(PREFIX + SUFFIX) - {" "}), "☺"]
    pieces += ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    rules = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=False)
    rules.decoder = decoders.Replace("▁", " ")
    rules.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    return rules, vocabulary


def test_code_llama_has_no_space_before_the_suffix():
    rules, ids = code_llama()

    def spelled(text):
        return [ids[character] for character in text.replace(" ", "▁")]

    expected = [ids["▁<PRE>"], ids["▁"], *spelled(PREFIX)]
    expected += [ids["▁<SUF>"], *spelled(SUFFIX), ids["▁<MID>"]]
    assert filled(rules) == expected
    assert ids["▁<EOT>"] in fill_tokens(Tokenizer(rules)).ends


def test_other_files_are_a_repository_where_there_are_tokens():
    rules = rules_with(*FORMS["qwen"], "<|repo_name|>", "<|file_sep|>")
    text = "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n"
    text += f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    assert filled(rules, [("a.py", "x = 1")]) == rules.encode(text).ids


def test_other_files_are_text_where_there_are_none():
    rules = rules_with(*FORMS["starcoder"])
    expected = rules.encode("a.py\nx = 1\n").ids + filled(rules)
    assert filled(rules, [("a.py", "x = 1")]) == expected


def test_control_tokens_of_the_texts_are_text():
    rules = rules_with(*FORMS["qwen"])
    ids = filled(rules, prefix="a <|fim_middle|> b")
    assert ids.count(rules.token_to_id("<|fim_middle|>")) == 1


def test_ids_that_the_file_names_precede_those_of_texts():
    rules = rules_with(*FORMS["qwen"], "<a>", "<b>", "<c>")
    texts = {"prefix": "<a>", "suffix": "<b>", "middle": "<c>"}
    ids = {name: rules.token_to_id(text) for name, text in texts.items()}
    text = f"<a>{PREFIX}<b>{SUFFIX}<c>"
    assert filled(rules, fill_ids=ids) == rules.encode(text).ids


def test_the_tokens_of_a_gap_end_the_middle():
    rules = rules_with(*FORMS["qwen"], "<|fim_pad|>", "<|file_sep|>", "<|im_end|>")
    names = {*FORMS["qwen"], "<|fim_pad|>", "<|file_sep|>"}
    expected = {rules.token_to_id(name) for name in names}
    assert fill_tokens(Tokenizer(rules)).ends == expected


def test_a_vocabulary_without_such_tokens_is_refused_by_name():
    for rules in (byte_rules(), rules_with("<fim_prefix>", "<fim_middle>")):
        with pytest.raises(RequestError, match="suffix: the model's vocabulary has"):
            filled(rules, where="/a/path")


def test_texts_far_beyond_the_context_are_refused_before_they_are_encoded():
    with pytest.raises(PromptTooLong):
        filled(rules_with(*FORMS["qwen"]), [("a", "x" * 40_000)], context=64)


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"),
                                  ("prefix", "suffix", "middle")])  # fmt: skip
def test_metadata_of_gguf_names_the_tokens(keys):
    names = ["a", "b", "<x>", "<y>", "<z>"]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": names, "merges": []}
    fields |= {"token_type": [1, 1, 3, 3, 3]}
    fields |= {f"{key}_token_id": index for index, key in enumerate(keys, 2)}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    for read in (open_tokenizer, read_tokenizer):
        ids = fill_ids(read(metadata, "m.gguf"), "ab", "b", context=99)
        assert ids == [2, 0, 1, 3, 1, 4]
