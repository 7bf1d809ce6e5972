"""Running language models from GGUF files."""

from ggjit.llm.batch import Batch
from ggjit.llm.llm import LLM
from ggjit.llm.sampling import Sampler

__all__ = ["LLM", "Batch", "Sampler"]
