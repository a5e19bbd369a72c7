"""Activations and gradients on their way between the stages of a pipeline.

[Note: known shapes] Who receives has to know how much. The first micro-batch of a kind (the shapes of its tensors, and
what is done with it) is announced by a header of its shape; later ones are not, so that they are received while the
stage computes. A stage whose output has another shape than it had for the same kind raises: the next waits for that.
"""

from collections import deque
from collections.abc import Callable, Hashable

import torch
from shardlight.strategies.engine.collectives import Collectives, Message
from shardlight.strategies.errors import PipelineError
from torch import Tensor

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MOST_DIMS = 8
_HEADER = 2 + _MOST_DIMS

Form = tuple[torch.dtype, tuple[int, ...]]
Kind = Hashable
"""What tells micro-batches apart whose activations may have different shapes; equal on all stages."""


class Messages:
    """What one rank of a pipeline exchanges with the ranks of neighbouring stages.

    Args:
        ranks: of one pipeline, by rank.
        placement: the rank of each virtual stage.
        device: where tensors are.
    """

    def __init__(self, ranks: Collectives, placement: tuple[int, ...], device: torch.device) -> None:
        self._ranks = ranks
        self._placement = placement
        self._device = device
        self._forms: dict[tuple[Kind, int], Form] = {}
        """By kind and virtual stage: of the stage's output."""
        self._here: dict[tuple[str, int, int], Tensor] = {}
        """What a stage of this rank hands to another stage of this rank."""
        self._expected: dict[tuple[str, int, int], tuple[Tensor, Message]] = {}
        self._sent: deque[Message] = deque()

    def send_activation(self, kind: Kind, stage: int, micro_batch: int, hidden: Tensor) -> None:
        """Hands a stage's output to the next stage."""
        value = hidden.detach()
        form = value.dtype, tuple(value.shape)
        known = self._forms.get((kind, stage))
        if known is not None and known != form:
            raise PipelineError(
                f"stage {stage} puts out {_shown(form)} for micro-batch {micro_batch}, and {_shown(known)} before for "
                "batches of the same shapes: what goes from stage to stage may depend on the shapes of a batch, not on "
                "its values. Pad it, or use zero3."
            )
        self._forms[kind, stage] = form
        to = self._placement[stage + 1]
        if to == self._ranks.rank:
            self._here["activation", stage + 1, micro_batch] = value
            return
        if known is None:
            self._send(_header(form, stage), to, self._tag(stage, micro_batch, 2))
        self._send(value.contiguous(), to, self._tag(stage, micro_batch, 0))

    def expect_activation(self, kind: Kind, stage: int, micro_batch: int) -> None:
        """Starts to receive the input of a stage, where its shape is known."""
        form = self._forms.get((kind, stage - 1))
        if form is not None:
            self._expect("activation", stage, micro_batch, form, self._placement[stage - 1], stage - 1, 0)

    def take_activation(self, kind: Kind, stage: int, micro_batch: int) -> Tensor:
        """Returns the input of a stage, once it is there."""
        place = "activation", stage, micro_batch
        source = self._placement[stage - 1]
        if source != self._ranks.rank and (kind, stage - 1) not in self._forms:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
            tag = self._tag(stage - 1, micro_batch, 2)
            self._ranks.start_receive(header, source, tag, f"input of stage {stage}").wait()
            self._forms[kind, stage - 1] = _form(header)
        return self._take(place, lambda: self.expect_activation(kind, stage, micro_batch))

    def send_gradient(self, stage: int, micro_batch: int, gradient: Tensor) -> None:
        """Hands the gradient of a stage's input to the stage before."""
        to = self._placement[stage - 1]
        if to == self._ranks.rank:
            self._here["gradient", stage - 1, micro_batch] = gradient
        else:
            self._send(gradient.contiguous(), to, self._tag(stage - 1, micro_batch, 1))

    def expect_gradient(self, kind: Kind, stage: int, micro_batch: int) -> None:
        """Starts to receive the gradient of a stage's output."""
        form = self._forms.get((kind, stage))
        if form is not None:
            self._expect("gradient", stage, micro_batch, form, self._placement[stage + 1], stage, 1)

    def take_gradient(self, kind: Kind, stage: int, micro_batch: int) -> Tensor:
        """Returns the gradient of a stage's output, once it is there."""
        return self._take(("gradient", stage, micro_batch), lambda: self.expect_gradient(kind, stage, micro_batch))

    def finish(self) -> None:
        """Returns when all that was sent has arrived."""
        while self._sent:
            self._sent.popleft().wait()

    def _expect(self, what: str, stage: int, micro_batch: int, form: Form, source: int, border: int, way: int) -> None:
        place = what, stage, micro_batch
        if source == self._ranks.rank or place in self._expected:
            return
        into = torch.empty(form[1], dtype=form[0], device=self._device)
        tag = self._tag(border, micro_batch, way)
        message = self._ranks.start_receive(into, source, tag, f"{what} for stage {stage}")
        self._expected[place] = into, message

    def _take(self, place: tuple[str, int, int], expect: Callable[[], None]) -> Tensor:
        if place in self._here:
            return self._here.pop(place)
        expect()
        tensor, message = self._expected.pop(place)
        message.wait()
        return tensor

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self._sent.append(self._ranks.start_send(tensor, to, tag, "activations and gradients between stages"))

    def _tag(self, border: int, micro_batch: int, way: int) -> int:
        """Returns what a message is recognised by; `way`: 0 activation, 1 gradient, 2 header of an activation."""
        return 1 + (micro_batch * len(self._placement) + border) * 3 + way


def _header(form: Form, stage: int) -> Tensor:
    dtype, shape = form
    if dtype not in _DTYPES or len(shape) > _MOST_DIMS:
        raise PipelineError(f"stage {stage} puts out {_shown(form)}, which cannot be sent to the next stage.")
    row = [_DTYPES.index(dtype), len(shape), *shape]
    return torch.tensor(row + [0] * (_HEADER - len(row)), dtype=torch.int64)


def _form(header: Tensor) -> Form:
    dtype, dims, *shape = header.tolist()
    return _DTYPES[dtype], tuple(shape[:dims])


def _shown(form: Form) -> str:
    return f"{str(form[0]).removeprefix('torch.')} {tuple(form[1])}"
