"""How instructions.jsonl was made: questions about Python's own functions, answered by their docstrings.

python data/make_instructions.py > data/instructions.jsonl
"""

import builtins
import inspect
import itertools
import json
import math
import operator
import os
import random
import re
import statistics
import time
from collections.abc import Iterator

PLACES = [builtins, str, bytes, list, dict, set, int, float, math, itertools, operator, random, statistics, time, os]
MOST = 18
"""At most so many of each place."""


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring in one line."""
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)\]])\. ", paragraph)[0].rstrip(".") + "."


def instructions() -> Iterator[dict[str, str]]:
    """Yields {"instruction", "response"}; no answer twice, so that none is in both training and validation."""
    seen = set()
    for place in PLACES:
        prefix = "" if place is builtins else f"{place.__name__}."
        found = 0
        for name, item in sorted(vars(place).items()):
            is_error = isinstance(item, type) and issubclass(item, BaseException)
            if name.startswith("_") or not callable(item) or is_error:
                continue
            answer = first_sentence(item.__doc__ or "")
            if "->" in answer or not 15 <= len(answer) <= 110 or answer in seen or found == MOST:
                continue
            seen.add(answer)
            found += 1
            yield {"instruction": f"What does {prefix}{name} do?", "response": answer}


if __name__ == "__main__":
    for line in instructions():
        print(json.dumps(line))
