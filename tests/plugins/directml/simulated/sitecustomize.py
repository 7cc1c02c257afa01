"""A simulated WSL for each Python that starts with this folder in its path."""

import os
from pathlib import Path

from inl_directml import probe

probe.WSL = Path(os.devnull)
