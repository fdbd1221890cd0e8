"""Exact prefix caching for Gated DeltaNet hybrids on vLLM, with checkpoints inside the KV pages."""

__version__ = "0.1.0"
