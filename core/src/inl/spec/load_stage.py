"""Stages of loading a model, for progress reports."""

from __future__ import annotations

from enum import StrEnum


class LoadStage(StrEnum):
    """A stage of loading; its value is the label that a progress bar shows."""

    LOADING = "loading weights"
    PACKING = "packing weights"
    SAVING = "saving packed weights"
    COMPILING = "compiling programs"
