"""Paged attention for JAX in which every layer keeps its own window."""

from typing import TYPE_CHECKING

from jaxattn.attention import attend as attend
from jaxattn.attention import kv_pages_shape as kv_pages_shape
from jaxattn.attention import ragged_paged_attention as ragged_paged_attention
from jaxattn.batch import PageTable as PageTable
from jaxattn.batch import RaggedBatch as RaggedBatch
from jaxattn.cache.plan import CacheGroup as CacheGroup
from jaxattn.cache.plan import CachePlan as CachePlan
from jaxattn.cache.plan import group_layers as group_layers
from jaxattn.cache.state import CacheState as CacheState
from jaxattn.cache.state import init_cache as init_cache
from jaxattn.engine.outputs import CompletionOutput as CompletionOutput
from jaxattn.engine.outputs import Logprob as Logprob
from jaxattn.engine.outputs import RequestOutput as RequestOutput
from jaxattn.engine.outputs import StreamChunk as StreamChunk
from jaxattn.kernels.pallas.gpu_shape import GpuTiles as GpuTiles
from jaxattn.kernels.pallas.tiles import DecodeTiles as DecodeTiles
from jaxattn.kernels.pallas.tiles import PrefillTiles as PrefillTiles
from jaxattn.kernels.pallas.tiles import Tiles as Tiles
from jaxattn.registry import Backend as Backend
from jaxattn.registry import Capabilities as Capabilities
from jaxattn.registry import Target as Target
from jaxattn.registry import UnsupportedAttentionError as UnsupportedAttentionError
from jaxattn.sampling import SamplingParams as SamplingParams
from jaxattn.spec import LayerSpec as LayerSpec
from jaxattn.spec import MaskSpec as MaskSpec
from jaxattn.spec import StoreSpec as StoreSpec
from jaxattn.support import support_table as support_table

if TYPE_CHECKING:
    from jaxattn.engine.llm import LLM as LLM


def __getattr__(name: str) -> type:
    """`LLM` on first use: flax, gguf and sentencepiece take longer to import than all the rest."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxattn.engine.llm import LLM

    globals()["LLM"] = LLM
    return LLM


def __dir__() -> list[str]:
    return sorted({*globals(), "LLM"})
