"""INL dynamics and mixture of experts on arrays, from inl-toolkit."""

from inl.toolkit import alias

alias(__name__)
