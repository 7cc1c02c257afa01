"""Backends on GPUs: captured graphs, capture sizes and tuning."""
