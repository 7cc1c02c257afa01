"""VaultGemma (Google, 2025): Gemma 2 without norms after its blocks."""

from __future__ import annotations

from dataclasses import replace

from inl.models import gemma, gemma2, llama


def weights(c: gemma.GemmaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def plain(_at: str, layer: llama.Layer) -> llama.Layer:
        return llama.Layer(*(block._replace(post=None) for block in layer))

    return llama.with_layers(gemma.weights(c), plain)


MODEL = replace(gemma2.MODEL, weights=weights)
