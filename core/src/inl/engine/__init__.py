"""The inference engine: requests in, tokens and text out, over any runner."""
