"""Requests in, tokens out: scheduler, runner, engine."""
