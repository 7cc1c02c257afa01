"""The engine under the names of the documents that INL replaces; nothing is computed
here.
"""

from inl.config import EngineConfig as EngineConfig
from inl.engine.inference_engine import Completion as Completion
from inl.engine.inference_engine import InferenceEngine as InferenceEngine
from inl.inference.streaming import StreamingSession as StreamingSession
from inl.inference.views import BatchScheduler as BatchScheduler
from inl.inference.views import ContinuousBatcher as ContinuousBatcher
from inl.inference.views import GenerationConfig as GenerationConfig
from inl.inference.views import KVCache as KVCache
from inl.inference.views import PagedKVCache as PagedKVCache
from inl.inference.views import SpeculativeDecoder as SpeculativeDecoder
