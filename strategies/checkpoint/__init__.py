"""Checkpoints: a folder of safetensors files and one JSON manifest, written last; nothing in it can run code."""

from shardlight.strategies.lazy_names import serve

__all__ = ["export_safetensors"]

__getattr__ = serve(__name__, {"export_safetensors": "export"})
