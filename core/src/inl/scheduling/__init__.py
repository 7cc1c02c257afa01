"""Continuous batching: requests, block tables and step plans, in plain integers.

Floats are single numbers: sampling parameters, log-probabilities, seconds. Arrays are
int32: the ids of a prompt and masks of tokens. Drafters, grammars and embeddings are
behind interfaces, whose implementations the engine passes in.
"""
