"""Write a GGUF file as OpenVINO's own format; runs in OpenVINO's environment.

python save_openvino.py MODEL.gguf: the files come to lie beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openvino_genai

source = Path(sys.argv[1])
openvino_genai.LLMPipeline(str(source), "CPU", enable_save_ov_model=True)
size = source.with_name("openvino_model.bin").stat().st_size
source.with_name("weight_bytes.json").write_text(json.dumps(size), "utf-8")
source.unlink()
