"""HTTP server for one engine: OpenAI, Anthropic and operations endpoints.

A request that generates has five objects: the ``Record`` that is logged, the
``Exchange`` of its dialect with the ``Job`` that it parsed, the ``OpenCall`` from its
admission to its end, and for each completion a ``Generation`` and a parser of its text.
"""
