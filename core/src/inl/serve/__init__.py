"""HTTP server for one engine: OpenAI, Anthropic and operations endpoints."""
