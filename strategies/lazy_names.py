"""Names of a package that are imported when they are first used (PEP 562): torch and Lightning take long."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def serve(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`.

    Args:
        homes: by name: the module below the package that has it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get
