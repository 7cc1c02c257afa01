"""Ollama's dialect: chat, generate, and the endpoints about models."""
