"""The inference engine: text in, text out, over any runner."""
