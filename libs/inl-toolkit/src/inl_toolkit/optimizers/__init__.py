"""Quantization, fusion and placement of models, each with what it measured or why."""

from inl.executor.planner import Parallelism as Parallelism
from inl.executor.planner import get_optimal_parallelism as get_optimal_parallelism
from inl_toolkit.optimizers.autotune import AutotuneResult as AutotuneResult
from inl_toolkit.optimizers.autotune import autotune as autotune
from inl_toolkit.optimizers.fusion import apply_kernel_fusion as apply_kernel_fusion
from inl_toolkit.optimizers.memory_layout import from_tiles as from_tiles
from inl_toolkit.optimizers.memory_layout import to_tiles as to_tiles
from inl_toolkit.optimizers.parallel import apply_parallelism as apply_parallelism
from inl_toolkit.optimizers.pipeline import HybridSchedule as HybridSchedule
from inl_toolkit.optimizers.pipeline import InterleavedSchedule as InterleavedSchedule
from inl_toolkit.optimizers.pipeline import PipelineSchedule as PipelineSchedule
from inl_toolkit.optimizers.pipeline import pipeline_bubble as pipeline_bubble
from inl_toolkit.optimizers.quantize import (
    quantize_for_inference as quantize_for_inference,
)
