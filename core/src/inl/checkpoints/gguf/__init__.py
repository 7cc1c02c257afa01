"""GGUF files under the names of the Hugging Face layout."""
