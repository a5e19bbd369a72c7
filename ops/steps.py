"""An optimizer's step over a list of tensors, in one pass over memory: what the ops of all optimizers share.

Per element: gradient * scale * clip, weight decay, update of states and parameter, a copy of the parameter in another
dtype. It is computed in fp32 (in fp64 for fp64 parameters), whatever dtype a tensor has, and rounded once, when it is
written.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from shardlight.ops.native import FLOATING, NUMBER_OF, Step, check, current, loaded, pointers, stream_of
from shardlight.ops.registry import OPS
from torch import Tensor, library

MAX_STATES = 3
_dtype_of, _device_of = attrgetter("dtype"), attrgetter("device")
Kind = tuple[torch.device, tuple[torch.dtype | None, ...]]
Reference = Callable[[Tensor, Tensor, list[Tensor | None], float], None]
"""Updates a parameter and its states in place, given the gradient and the number of this step, from 1."""
Tensors = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step goes over; all sequences have one entry per tensor, equal in shape.

    Attributes:
        params, grads, states: floating or complex, of any dtypes and strides; up to three states, None for one that
            the step does not have.
        numbers: of this step, from 1.
        scale, clip: gradients are multiplied by one, and then by the other; negative to go uphill.
        copies: None, or what the parameter is also written to, in another dtype; None for a tensor: nothing.
    """

    params: Tensors
    grads: Tensors
    states: tuple[Tensors | None, ...]
    numbers: Sequence[float]
    scale: float = 1.0
    clip: float = 1.0
    copies: Sequence[Tensor | None] | None = None


def step_operator(name: str, mutates: Sequence[str]) -> Callable[[Callable[..., None]], Any]:
    """Makes a function an operator of PyTorch that writes to its arguments of these names and returns nothing."""

    def made(function: Callable[..., None]) -> Any:
        operator = library.custom_op(f"shardlight::{name}", function, mutates_args=mutates)
        operator.register_fake(lambda *args, **kwargs: None)
        return operator

    return made


def take_step(stem: str, batch: Batch, options: Sequence[float], reference: Reference) -> None:
    """Steps every tensor of a batch: with compiled code where there is some for its device, dtype and layout.

    Args:
        stem: of the op.
        options: its options, as csrc/STEM.h numbers them.
        reference: the same with PyTorch's operations.
    """
    with torch.no_grad():
        columns = _columns(batch)
        kind = _uniform(columns)
        if kind is not None and OPS[stem].native(kind[0].type):
            _step_natively(stem, batch, columns, list(batch.numbers), kind, options)
            return
        # One by one: mixed dtypes, devices or layouts, complex numbers, or no compiled code.
        for n, number in enumerate(batch.numbers):
            tensors = _tensors(batch, n)
            one = [None if t is None else [t] for t in tensors]
            kind = _uniform(one)
            if kind is not None and OPS[stem].native(kind[0].type):
                _step_natively(stem, batch, one, [number], kind, options)
            elif tensors[0].numel():
                _step_with_reference(tensors, batch, number, reference)


def _columns(batch: Batch) -> list[Tensors | None]:
    """Returns parameters, gradients, three states, copies; None for what there is not."""
    states = [*batch.states, *[None] * (MAX_STATES - len(batch.states))]
    copies = batch.copies
    return [batch.params, batch.grads, *states, copies]


def _uniform(columns: list[Tensors | None]) -> Kind | None:
    """Returns the device and, by column, the dtype that all tensors of a batch have; None where compiled code has no
    version for them together.
    """
    dtypes: list[torch.dtype | None] = []
    devices = set()
    for column in columns:
        if column is None:
            dtypes.append(None)
            continue
        # Mapped in C: with some hundred parameters a loop in Python shows.
        if type(None) in set(map(type, column)) or not all(map(Tensor.is_contiguous, column)):
            return None
        kinds = set(map(_dtype_of, column))
        devices.update(map(_device_of, column))
        if len(kinds) != 1 or len(devices) != 1:
            return None
        dtypes.append(kinds.pop())
    found = tuple(dtypes)
    return (devices.pop(), found) if devices and _has_version(found) else None


def _tensors(batch: Batch, n: int) -> list[Tensor | None]:
    """Returns parameter, gradient, three states, copy; complex ones as real ones."""
    states = [None if s is None else s[n] for s in batch.states]
    states += [None] * (MAX_STATES - len(states))
    copy = None if batch.copies is None else batch.copies[n]
    found = [batch.params[n], batch.grads[n], *states, copy]
    if found[0].is_complex():
        found = [None if t is None else torch.view_as_real(t) for t in found]
    return found


def _has_version(dtypes: tuple[torch.dtype | None, ...]) -> bool:
    param, grad, *states, _ = dtypes
    kept = {s for s in states if s is not None}
    if any(d is not None and d not in FLOATING for d in dtypes) or len(kept) > 1:
        return False
    return param == torch.float64 or torch.float64 not in {grad, *kept}


def _step_with_reference(tensors: list[Tensor | None], batch: Batch, number: float, reference: Reference) -> None:
    param, grad, *states, copy = tensors
    wide = torch.float64 if torch.float64 in {param.dtype, grad.dtype} else torch.float32
    x, g = param.to(wide), grad.to(wide) * batch.scale * batch.clip
    kept = [None if s is None else s.to(wide) for s in states]
    reference(x, g, kept, number)
    for old, new in zip([param, *states], [x, *kept], strict=True):
        if old is not None and old is not new:
            old.copy_(new)
    if copy is not None:
        copy.copy_(x)


def _step_natively(
    stem: str,
    batch: Batch,
    columns: list[Tensors | None],
    numbers: Sequence[float],
    kind: Kind,
    options: Sequence[float],
) -> None:
    device, dtypes = kind
    param, grad, *states, copy = dtypes
    count = len(numbers)
    assert columns[0] is not None
    held = [None if column is None else pointers(column) for column in columns]
    sizes = (ctypes.c_int64 * count)(*map(Tensor.numel, columns[0]))
    at = (ctypes.c_double * count)(*numbers)
    given = (ctypes.c_double * len(options))(*options)
    where = [None if h is None else ctypes.addressof(h) for h in held]
    used = [dtype for dtype in states if dtype is not None]
    step = Step(
        count=count,
        numel=ctypes.addressof(sizes),
        parameter=where[0],
        gradient=where[1],
        state=(ctypes.c_void_p * MAX_STATES)(*where[2:5]),
        copy=where[5],
        number=ctypes.addressof(at),
        options=ctypes.addressof(given),
        scale=batch.scale,
        clip=batch.clip,
        parameter_dtype=NUMBER_OF[param],
        gradient_dtype=NUMBER_OF[grad],
        state_dtype=NUMBER_OF[used[0] if used else param],
        copy_dtype=NUMBER_OF[param if copy is None else copy],
        threads=torch.get_num_threads(),
        stream=stream_of(device),
    )
    uses = sum(1 << i for i, dtype in enumerate(states) if dtype is not None)
    on_cuda = device.type == "cuda"
    function = getattr(loaded("cuda" if on_cuda else "cpu"), f"{'cuda' if on_cuda else 'ops'}_{stem}")
    with current(device):
        error = function(ctypes.byref(step), uses)
    # Autograd has not seen it: a backward through an older forward is an error.
    torch.autograd.graph.increment_version(columns[0])
    check(error, f"ops.{stem} with states {uses} and dtypes {dtypes}", device)
