"""What a user should know of a run that goes on: warnings of a class of their own, which commands show plainly."""

import warnings
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


class Notice(UserWarning):
    """A warning that says all there is to say, so that a place in the source would add nothing."""


def notify(text: str) -> None:
    """Warns on rank 0."""
    rank_zero_warn(text, category=Notice, stacklevel=5)


def show_plainly() -> None:
    """Lets notices be shown, from now on in this process, as their text alone."""
    before = warnings.formatwarning
    if getattr(before, "shows_notices", False):
        return

    def form(message: Any, category: type[Warning], *place: Any, **more: Any) -> str:
        return f"{message}\n" if issubclass(category, Notice) else before(message, category, *place, **more)

    form.shows_notices = True  # type: ignore[attr-defined]
    warnings.formatwarning = form
