"""Batches under pipeline: the same one on all stages, cut into micro-batches; what steps return for these, joined."""

import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.errors import PipelineError
from torch import Tensor


def batch_rows(batch: Any) -> int:
    """Returns how many samples a batch has: the length of its tensors' first dimension.

    Raises: PipelineError: it has no tensor with one, or they differ.
    """
    rows: dict[int, str] = {}

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim():
            rows.setdefault(tensor.shape[0], str(tuple(tensor.shape)))
        return tensor

    apply_to_collection(batch, Tensor, look)
    if len(rows) != 1:
        what = "has no tensor with a first dimension" if not rows else f"has tensors of {' and '.join(rows.values())}"
        raise PipelineError(
            f"a batch is cut into micro-batches along the first dimension of its tensors, and this one {what}. Let the "
            "data loader return tensors with one row per sample, or define split_batch(batch, parts) in the module, "
            "which returns the parts."
        )
    return next(iter(rows))


def split_batch(batch: Any, rows: int, parts: int) -> list[Any]:
    """Cuts a batch into parts of nearly equal size, the larger ones first; 0-dim tensors and plain data are in each.

    Lists of strings or numbers with one entry per sample are cut too.

    Args:
        rows: see `batch_rows`; at least `parts`.
    """
    size, larger = divmod(rows, parts)
    ends = [part * size + min(part, larger) for part in range(parts + 1)]
    return [_slice(batch, rows, slice(*ends[part : part + 2])) for part in range(parts)]


def _slice(batch: Any, rows: int, part: slice) -> Any:
    if type(batch) in (list, tuple):
        if len(batch) == rows and all(isinstance(item, str | int | float) for item in batch):
            return batch[part]
        return type(batch)(_slice(item, rows, part) for item in batch)
    if type(batch) is dict:
        return {key: _slice(value, rows, part) for key, value in batch.items()}
    return apply_to_collection(batch, Tensor, lambda t: t[part] if t.dim() else t)


def batch_kind(batch: Any) -> Hashable:
    """Returns the shapes and dtypes of a batch's tensors, in order."""
    found: list[Hashable] = []
    apply_to_collection(batch, Tensor, lambda t: found.append((tuple(t.shape), t.dtype)) or t)
    return tuple(found)


def join_results(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Joins what a step returned for the micro-batches of one batch.

    Tensors with one row per sample follow each other, of other floating-point values the mean over samples is taken,
    trees are joined leaf by leaf; of anything else there is a list.

    Args:
        sizes: samples of each micro-batch.
    """
    first = results[0]
    if first is None or len(results) == 1:
        return first
    if isinstance(first, Tensor):
        if first.dim() and all(r.dim() and r.shape[0] == n for r, n in zip(results, sizes, strict=True)):
            return torch.cat(list(results))
        if first.is_floating_point() and len({r.shape for r in results}) == 1:
            weights = torch.tensor(sizes, dtype=first.dtype, device=first.device) / sum(sizes)
            return torch.stack(list(results)).mul(weights.view(-1, *[1] * first.dim())).sum(dim=0)
        return list(results)
    if isinstance(first, Mapping):
        return {key: join_results([r[key] for r in results], sizes) for key in first}
    if isinstance(first, list | tuple) and len({len(r) for r in results}) == 1:
        if isinstance(first, list) and [len(r) for r in results] == list(sizes):
            return [item for r in results for item in r]
        return type(first)(join_results(items, sizes) for items in zip(*results, strict=True))
    return list(results)


def same_batch(batch: Any, ranks: Collectives) -> Any:
    """Returns the first stage's batch on all stages. Collective."""
    if ranks.world_size == 1:
        return batch
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, lambda t: tensors.append(t) or t)
    form = repr((batch_kind(batch), _plain(batch)))
    own = torch.tensor([zlib.crc32(form.encode())], dtype=torch.int64, device=ranks.device)
    if len(set(ranks.gather_small(own, "batch").view(-1).tolist())) > 1:
        mine = apply_to_collection(batch, Tensor, Tensor.cpu) if ranks.rank == 0 else None
        found = ranks.gather_objects(mine, "batch")
        return apply_to_collection(found[0], Tensor, lambda t: t.to(ranks.device))

    def shared(tensor: Tensor) -> Tensor:
        # Not into the tensor itself, which a dataset may hold.
        own = tensor.contiguous() if ranks.rank == 0 else tensor.clone(memory_format=torch.contiguous_format)
        ranks.broadcast(own, "batch")
        return own

    return apply_to_collection(batch, Tensor, shared)


def _plain(batch: Any) -> Any:
    """Returns what is in a batch beside tensors."""
    if isinstance(batch, Tensor):
        return None
    if isinstance(batch, dict):
        return [(key, _plain(value)) for key, value in batch.items()]
    if isinstance(batch, list | tuple):
        return [_plain(item) for item in batch]
    return batch if isinstance(batch, str | int | float | bool | type(None)) else type(batch).__name__
