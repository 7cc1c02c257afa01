"""Tokenizer, incremental detokenizer and chat template."""
