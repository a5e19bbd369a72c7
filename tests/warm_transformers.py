"""Imported by the fork server beside `warm.py` when tests with transformers models are about to run."""

import contextlib
import importlib

for family in ("llama", "qwen3", "gpt2", "bert", "mixtral", "t5"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
for name in ("transformers.generation", "peft", "peft.tuners.lora"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
