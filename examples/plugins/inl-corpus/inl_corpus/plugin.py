"""Registers the drafter ``EngineConfig(speculation="corpus", draft_model=FILE)``."""

from inl.plugin import hookimpl


@hookimpl
def inl_register_drafters(register):
    register("corpus", "inl_corpus.drafter:Corpus")
