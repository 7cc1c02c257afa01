"""Anthropic's dialect: messages."""
