"""Engines on a tiny model, and device types without a backend."""

from tiny_engines import drained as drained
from tiny_engines import engines as engines
from tiny_engines import tiny_made as tiny_made
from tiny_engines import without_backend as without_backend
