"""Quantization, fusion and placement of models, each with what it measured or why."""

from inl.optimizers.autotune import Tuning as Tuning
from inl.optimizers.autotune import autotune as autotune
from inl.optimizers.fusion import apply_kernel_fusion as apply_kernel_fusion
from inl.optimizers.memory_layout import from_tiles as from_tiles
from inl.optimizers.memory_layout import to_tiles as to_tiles
from inl.optimizers.pipeline import HybridSchedule as HybridSchedule
from inl.optimizers.pipeline import PipelineSchedule as PipelineSchedule
from inl.optimizers.pipeline import pipeline_bubble as pipeline_bubble
from inl.optimizers.planner import Parallelism as Parallelism
from inl.optimizers.planner import get_optimal_parallelism as get_optimal_parallelism
from inl.optimizers.quantize import quantize_for_inference as quantize_for_inference
