"""OpenAI's dialects: chat, completions, responses and embeddings."""
