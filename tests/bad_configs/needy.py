"""Needs packages that are not there."""

from typing import TYPE_CHECKING

import shardlight_no_such_package
from needy_part import part
from shardlight.framework import TrainingModule
from shardlight_no_such_package.inner import thing

if TYPE_CHECKING:
    import shardlight_no_such_types
try:
    import shardlight_no_such_option
except ImportError:
    shardlight_no_such_option = None


class Model(TrainingModule):
    """Cannot be imported."""

    def __init__(self, width: int) -> None:
        super().__init__()
        import shardlight_no_such_use

        self.parts = (part, thing, shardlight_no_such_package, shardlight_no_such_use)

    def training_step(self, batch: "shardlight_no_such_types.Batch", batch_idx: int) -> None:
        """Has no loss."""
