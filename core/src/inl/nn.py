"""Tensors with gradients, layers, losses and optimizers, from inl-toolkit."""

from inl.toolkit import alias

alias(__name__)
