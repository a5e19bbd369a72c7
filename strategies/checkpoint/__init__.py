"""Checkpoints: a directory of safetensors files and one JSON manifest, written last; nothing in it can run code."""

from shardlight.strategies.checkpoint.export import export_safetensors

__all__ = ["export_safetensors"]
