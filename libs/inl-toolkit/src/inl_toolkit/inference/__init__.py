"""The engine under the names of the documents that INL replaces; nothing is computed
here.
"""

from inl.config import EngineConfig as EngineConfig
from inl.engine.inference_engine import Completion as Completion
from inl.engine.inference_engine import InferenceEngine as InferenceEngine
from inl_toolkit.inference.streaming import StreamingSession as StreamingSession
from inl_toolkit.inference.views import BatchScheduler as BatchScheduler
from inl_toolkit.inference.views import ContinuousBatcher as ContinuousBatcher
from inl_toolkit.inference.views import GenerationConfig as GenerationConfig
from inl_toolkit.inference.views import KVCache as KVCache
from inl_toolkit.inference.views import PagedKVCache as PagedKVCache
from inl_toolkit.inference.views import SpeculativeDecoder as SpeculativeDecoder
