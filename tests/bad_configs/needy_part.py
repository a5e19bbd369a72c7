"""A part of the project that needs another one."""

import shardlight_no_such_part.deep as part

__all__ = ["part"]
