"""Matrix products and attention, on tensors that are divided."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from shardlight.strategies.engine.transforms.tensor.elementwise import common_place, fits, operand, seen
from shardlight.strategies.engine.transforms.tensor.exchange import (
    TensorGroup,
    gathered,
    gathered_for_parts,
    part_of,
    shared,
    summed,
    summed_part,
)
from shardlight.strategies.engine.transforms.tensor.random_parts import own_numbers
from shardlight.strategies.engine.transforms.tensor.sharded import (
    Sharded,
    as_held,
    full,
    local_of,
    named,
    on_parts,
    sharded,
)
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor, nn
from torch.nn import functional as F


def entering(x: Tensor, group: TensorGroup) -> Tensor:
    """Returns the whole input of column-parallel layers; their gradients for it are added up once.

    What several layers are given (queries, keys and values; gate and up) goes through one function of autograd, so one
    sum over the group in backward serves all of them. Under autocast it is sent in 16 bits.
    """
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if casts else x.dtype
    local = local_of(x) if type(x) is Sharded else x
    key = (group, local._version, dtype, torch.is_grad_enabled() and local.requires_grad)
    known = vars(x).get("_shardlight_entered")
    if known is not None and known[0] == key and (entered := known[1]()) is not None:
        return entered
    cast = local.to(dtype)
    if type(x) is not Sharded:
        entered = shared(cast, group)
    elif x.axis == len(x.whole_shape) - 1:
        entered = shared(gathered(cast, x.axis, x.division, group), group)
    else:
        entered = gathered_for_parts(cast, x.axis, x.division, group)
    # Not on a parameter: what is kept there would be a view of the engine's buffer that outlives the step.
    if entered is not x and not isinstance(x, nn.Parameter):
        # The graph of a leaf's use refers to the leaf itself, in a way that no collection sees through.
        held = ref(entered) if x.is_leaf and x.requires_grad else partial(_itself, entered)
        x._shardlight_entered = (key, held)  # type: ignore[attr-defined]
    return entered


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def column(x: Tensor, weight: Tensor, bias: Tensor | None, split: Split, group: TensorGroup) -> Sharded:
    """Multiplies by rows of a (out, in) weight: (..., in) whole -> (..., out) divided along the last dimension."""
    out = F.linear(entering(x, group), weight, bias)
    return sharded(out, out.dim() - 1, split, group)


def row(
    x: Tensor, weight: Tensor, bias: Tensor | None, split: Split, group: TensorGroup, along_sequence: bool = False
) -> Tensor:
    """Multiplies by columns of a (out, in) weight, and adds up: (..., in) divided -> (..., out) whole.

    Args:
        x: a whole one is divided first.
        bias: whole; it is added once, to the sum.
        along_sequence: the result is divided along the last dimension but one.
    """
    own = F.linear(last_part(x, split, group), weight)
    if bias is not None:
        bias = as_held(bias).to(own.dtype)
    if along_sequence and own.dim() > 1:
        dim = own.dim() - 2
        positions = Split.even(own.shape[dim], group.size)
        part = summed_part(own, dim, positions, group)
        return sharded(part if bias is None else part + shared(bias, group), dim, positions, group)
    out = summed(own, group)
    return out if bias is None else out + bias


def last_part(x: Tensor, split: Split, group: TensorGroup) -> Tensor:
    """Returns this rank's part of a tensor along its last dimension."""
    if type(x) is Sharded:
        if x.axis == len(x.whole_shape) - 1 and x.division.same(split):
            return local_of(x)
        x = full(x)
    return part_of(x, x.dim() - 1, split, group)


@on_parts(F.linear)
def _linear(func: Callable, args: tuple, kwargs: dict) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if type(weight) is Sharded:
        split, group, local = weight.division, weight.group, local_of(weight)
        if weight.axis == 0 and (bias is None or type(bias) is Sharded):
            return column(x, local, None if bias is None else local_of(bias), split, group)
        if weight.axis == 1 and type(bias) is not Sharded:
            return row(x, local, bias, split, group)
        return NotImplemented
    if type(bias) is Sharded or x.axis == len(x.whole_shape) - 1:
        return NotImplemented
    group = x.group
    out = func(local_of(x), shared(weight, group), None if bias is None else shared(bias, group))
    return sharded(out, x.axis, x.division, group)


def look_up(
    words: Tensor,
    weight: Tensor,
    split: Split,
    group: TensorGroup,
    padding: int | None = None,
    along_sequence: bool = False,
) -> Tensor:
    """Looks up the words that this rank has, and adds up: (...) whole -> (..., width) whole.

    Args:
        weight: (words of this rank, width).
        padding: the word whose row gets no gradient.
    Raises: IndexError: a word is not in the vocabulary.
    """
    words = full(words) if type(words) is Sharded else words
    own = split.ranges[group.rank]
    first, stop = own[0] if own else (0, 0)
    if words.device.type == "cpu" and words.numel() and not 0 <= int(words.min()) <= int(words.max()) < split.size:
        raise IndexError(f"index out of range in self: words {int(words.min())} to {int(words.max())} of {split.size}")
    elsewhere = (words < first) | (words >= stop)
    padding = None if padding is None or not first <= padding < stop else padding - first
    found = F.embedding((words - first).masked_fill(elsewhere, 0), weight, padding)
    found = found.masked_fill(elsewhere[..., None], 0.0)
    if along_sequence and found.dim() > 1:
        dim = found.dim() - 2
        positions = Split.even(found.shape[dim], group.size)
        return sharded(summed_part(found, dim, positions, group), dim, positions, group)
    return summed(found, group)


@on_parts(F.embedding)
def _embedding(func: Callable, args: tuple, kwargs: dict) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args, strict=False)) | kwargs
    words, weight, padding = given["input"], given["weight"], given.get("padding_idx")
    if any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return NotImplemented
    if type(weight) is not Sharded:
        out = F.embedding(words.local, shared(seen(weight), words.group), padding)
        return sharded(out, words.axis, words.division, words.group)
    if weight.axis == 0:
        padding = padding + weight.division.size if padding is not None and padding < 0 else padding
        return look_up(words, local_of(weight), weight.division, weight.group, padding)
    if type(words) is Sharded:
        return NotImplemented
    out = F.embedding(words, local_of(weight), padding)
    return sharded(out, out.dim() - 1, weight.division, weight.group)


@on_parts(*named("matmul bmm mm __matmul__ __rmatmul__"))
def _matmul(func: Callable, args: tuple, kwargs: dict) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    a, b = args if func.__name__ != "__rmatmul__" else args[::-1]
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    places = {}
    for name, x in (("a", a), ("b", b)):
        if type(x) is Sharded:
            places[name] = x.axis - len(x.whole_shape)
    group = next(x.group for x in (a, b) if type(x) is Sharded)
    if places.get("a") == -1 or places.get("b") == -2:
        return _contract(a, b, places, group)
    if set(places.values()) <= {-2} and "b" not in places:  # rows of the first
        return sharded(torch.matmul(local_of(a), shared(seen(b), group)), _ndim(a, b) - 2, a.division, group)
    if places == {"b": -1}:
        return sharded(torch.matmul(shared(seen(a), group), local_of(b)), _ndim(a, b) - 1, b.division, group)
    place = common_place([x for x in (a, b) if type(x) is Sharded])
    if place is None or place[0] > -3:
        return NotImplemented
    behind, split = place
    if not all(type(x) is Sharded or fits(x, behind, split) for x in (a, b)):
        return NotImplemented
    local = torch.matmul(*(operand(x, behind, split, group) for x in (a, b)))
    return sharded(local, local.dim() + behind, split, group)


def _ndim(a: Tensor, b: Tensor) -> int:
    return max(a.dim(), b.dim())


def _contract(a: Tensor, b: Tensor, places: dict[str, int], group: TensorGroup) -> Any:
    """Multiplies along the dimension that is divided, and adds up."""
    splits = [x.division for x in (a, b) if type(x) is Sharded]
    if places.get("a", -1) != -1 or places.get("b", -2) != -2 or not all(splits[0].same(s) and s.once for s in splits):
        return NotImplemented
    left = local_of(a) if type(a) is Sharded else part_of(seen(a), a.dim() - 1, splits[0], group)
    right = local_of(b) if type(b) is Sharded else part_of(seen(b), b.dim() - 2, splits[0], group)
    return summed(torch.matmul(left, right), group)


@on_parts(*named("addmm baddbmm"))
def _addmm(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Products of rows, or of batches: the operands in front are divided along the first dimension."""
    names = ("input", "mat1", "mat2") if func.__name__ == "addmm" else ("input", "batch1", "batch2")
    given = dict(zip(names, args, strict=False)) | kwargs
    if "out" in kwargs:
        return NotImplemented
    added, a, b = (given.pop(name) for name in names)
    if type(a) is not Sharded or a.axis != 0 or (func.__name__ == "addmm" and type(b) is Sharded):
        return NotImplemented
    behind, split, group = -len(a.whole_shape), a.division, a.group
    if func.__name__ == "baddbmm" and not (type(b) is Sharded and b.axis == 0 and b.division.same(split)):
        return NotImplemented
    if type(added) is Sharded and not (added.axis == 0 and added.division.same(split)):
        return NotImplemented
    last = local_of(b) if type(b) is Sharded else shared(seen(b), group)
    first = operand(added, behind, split, group)
    return sharded(func(first, local_of(a), last, **given), 0, split, group)


@on_parts(torch.einsum)
def _einsum(func: Callable, args: tuple, kwargs: dict) -> Any:
    if len(args) < 2 or not isinstance(args[0], str) or "." in args[0]:
        return NotImplemented
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(operands):
        return NotImplemented
    parts = [(x, term) for x, term in zip(operands, terms, strict=True) if type(x) is Sharded]
    letters = {term[x.axis] for x, term in parts}
    split, group = parts[0][0].division, parts[0][0].group
    if len(letters) != 1 or not all(x.division.same(split) for x, _ in parts):
        return NotImplemented
    letter = letters.pop()
    if any(term.count(letter) > 1 for term in terms) or not (letter in output or split.once):
        return NotImplemented
    local = []
    for x, term in zip(operands, terms, strict=True):
        if type(x) is Sharded:
            local.append(local_of(x))
        elif letter in term:
            local.append(part_of(seen(x), term.index(letter), split, group))
        else:
            local.append(shared(seen(x), group))
    out = torch.einsum(args[0], *local)
    return sharded(out, output.index(letter), split, group) if letter in output else summed(out, group)


@on_parts(F.scaled_dot_product_attention)
def _attention(func: Callable, args: tuple, kwargs: dict) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = given.pop("query"), given.pop("key"), given.pop("value")
    mask, grouped = given.pop("attn_mask", None), given.pop("enable_gqa", False)
    if type(q) is not Sharded or len(q.whole_shape) < 3 or type(mask) is Sharded:
        return NotImplemented
    behind = q.axis - len(q.whole_shape)
    if behind == -3:
        heads = q.whole_shape[-3]
        found = [_heads_for(q, x, heads // x.shape[-3] if grouped else 1) for x in (k, v)]
    else:  # a batch that is divided
        place = common_place([x for x in (q, k, v) if type(x) is Sharded])
        if behind > -3 or place is None or not place[1].same(q.division) or grouped:
            return NotImplemented
        found = [(operand(x, behind, q.division, q.group), 1) for x in (k, v)]
    if mask is not None:
        if not fits(mask, behind, q.division):
            return NotImplemented
        given["attn_mask"] = operand(mask, behind, q.division, q.group)
    query, (key, groups), (value, _) = local_of(q), *found
    if groups > 1:
        given["enable_gqa"] = True
    with own_numbers(q.group.rank, query.device) if given.get("dropout_p") else nullcontext():
        out = func(query, key, value, **given)
    return sharded(out, q.axis, q.division, q.group)


def _heads_for(q: Sharded, x: Tensor, each: int) -> tuple[Tensor, int]:
    """Returns the heads of keys or values that this rank's heads of queries need, and how many of these use one.

    Args:
        each: how many heads of all use one.
    """
    needed = [head // each for head in q.division.places(q.group.rank)]
    if type(x) is Sharded and x.axis == len(x.whole_shape) - 3:
        local, own = local_of(x), x.division.places(q.group.rank)
        if not set(needed) <= set(own):
            local, own = shared(full(x), q.group), list(range(x.whole_shape[-3]))
    else:
        whole = full(x) if type(x) is Sharded else x
        local, own = shared(seen(whole), q.group), list(range(whole.shape[-3]))
    different = sorted(set(needed))
    groups = len(needed) // max(1, len(different))
    if needed == [head for head in different for _ in range(groups)] and needed:
        first = own.index(different[0])
        if own[first : first + len(different)] == different:
            return local.narrow(-3, first, len(different)), groups
    index = torch.tensor([own.index(head) for head in needed], device=local.device)
    return local.index_select(-3, index), 1
