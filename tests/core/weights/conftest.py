"""Small valid model files."""

from model_files import default_checkpoint, gguf_writer, tensors, tiny_gguf

__all__ = ["default_checkpoint", "gguf_writer", "tensors", "tiny_gguf"]
