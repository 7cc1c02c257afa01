"""Quantization, placement and schedules of models, from inl-toolkit."""

from inl.toolkit import alias

alias(__name__)
