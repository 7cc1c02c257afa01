"""How models write answers: reasoning, tool calls and text, and what they mean."""
