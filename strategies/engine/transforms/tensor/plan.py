"""Which layers of a model are cut over a tensor group and how: derived from the module, with no communication."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, get_args

from shardlight.strategies.engine.choices import Norms, Override
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.engine.transforms.tensor.find import PER_HEAD, Attention, Found, Linear, find_layers
from shardlight.strategies.engine.transforms.tensor.layers import How, Layer
from shardlight.strategies.engine.transforms.tensor.split import Split
from shardlight.strategies.errors import TensorError
from torch import nn

_SHIPPED = {"colwise": "column", "rowwise": "row", "colwise_rep": "column", "colwise_gather_output": "column"}
_SHIPPED |= {"rowwise_rep": "row", "rowwise_split_input": "row"}
"""Of the styles in a plan that a transformers model ships, those that this one knows."""


@dataclass(frozen=True)
class TensorPlan:
    """How a model is cut over `size` ranks."""

    size: int
    norms: Norms
    layers: Mapping[str, Layer]
    """By name of the module."""
    whole: Mapping[str, str]
    """Why a module with parameters of its own is not cut, by its name."""
    cuts: Mapping[str, tuple[tuple[int, ...], int, Split]]
    """By name of each parameter that is cut, all names of tied ones: its logical shape, the dimension, and how."""
    blocks: tuple[str, ...] = field(default=())
    """Modules that are given whole inputs where norms are sharded: what is in them is not known."""

    def without(self, elsewhere: Collection[str]) -> "TensorPlan":
        """Returns the plan of a model without some parameters: layers of which one is missing are left as they are.

        Args:
            elsewhere: names of parameters on other stages of a pipeline.
        """
        gone = {name.rpartition(".")[0] for name in elsewhere}
        layers = {
            n: layer for n, layer in self.layers.items() if not any(g == n or g.startswith(f"{n}.") for g in gone)
        }
        cuts = {n: cut for n, cut in self.cuts.items() if n not in elsewhere}
        return replace(self, layers=layers, cuts=cuts) if elsewhere else self

    def slices(self, rank: int) -> dict[str, Slice]:
        """Returns which part a rank has, by name of each parameter that is cut; no two ranks have the same element."""
        return {name: Slice(shape, dim, split.ranges[rank]) for name, (shape, dim, split) in self.cuts.items()}

    def table(self) -> str:
        """Returns a table of what is cut and what is not, and why; layers that are alike in one row."""
        rows: dict[tuple[str, str, str], int] = Counter()
        for layer in self.layers.values():
            rows[_pattern(layer.name), layer.how, layer.why] += 1
        for name, why in self.whole.items():
            rows[_pattern(name), "whole", why] += 1
        lines = [("layer", "", "cut", "why")]
        lines += [(name, f"x{n}" if n > 1 else "", how, why) for (name, how, why), n in rows.items()]
        widths = [max(len(line[n]) for line in lines) for n in range(3)]
        return "\n".join(
            "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]]).rstrip()
            for line in lines
        )


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(the module itself)"


def tensor_plan(
    module: nn.Module, size: int, overrides: Mapping[str, Override] | None = None, norms: Norms = "whole"
) -> TensorPlan:
    """Returns how a module is cut over a tensor group of `size` ranks; the same on every rank.

    Args:
        module: whole, before anything is sharded; on any device, also meta.
        overrides: by pattern of a module's name (as in `fnmatch`), how it is cut instead; the first that fits counts.
        norms: see `Norms`.
    Raises: TensorError: heads do not divide by `size`, with the sizes that work; an override fits nothing, or not that.
    """
    maker = _Maker(module, size, dict(overrides or {}))
    maker.run()
    cuts: dict[str, tuple[tuple[int, ...], int, Split]] = {}
    modules = dict(module.named_modules())
    for name, layer in maker.layers.items():
        own = dict(modules[name].named_parameters(remove_duplicate=False))
        for inner, (dim, split) in layer.cut(modules[name]).items():
            cuts[f"{name}.{inner}" if name else inner] = (tuple(own[inner].shape), dim, split)
    _spread_to_ties(module, cuts)
    maker.rest(maker.found, cuts)
    unknown = _unknown_blocks(module, maker.layers) if norms == "sharded" else ()
    return TensorPlan(size, norms, maker.layers, maker.whole, cuts, unknown)


def _spread_to_ties(module: nn.Module, cuts: dict[str, tuple[tuple[int, ...], int, Split]]) -> None:
    """Gives every name of a parameter the same cut. Raises: TensorError: two uses of one would be cut otherwise."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for ties in names.values():
        found = [(n, cuts[n]) for n in ties if n in cuts]
        for name, cut in found[1:]:
            if cut[1] != found[0][1][1] or not cut[2].same(found[0][1][2]):
                places = [n.rpartition(".")[0] for n in (name, found[0][0])]
                raise TensorError(
                    f"tensor: '{name}' and '{found[0][0]}' are one parameter, and would be cut differently. Leave both "
                    f"layers whole: plan: {{{places[0]}: whole, {places[1]}: whole}}."
                )
        for name in ties:
            if found:
                cuts[name] = found[0][1]


def _unknown_blocks(module: nn.Module, layers: Mapping[str, Layer]) -> tuple[str, ...]:
    """Returns the outermost modules that are not cut, have matrices, and stand beside modules that are cut."""
    cut = set(layers)
    parents = {name.rpartition(".")[0] for name in cut}
    around = {p for name in cut for p in _around(name)}
    found = []
    for name, inner in module.named_modules():
        parent = name.rpartition(".")[0]
        if not name or name in cut or name in around or parent not in around or parent in parents:
            continue
        if any(p.dim() > 1 for p in inner.parameters()) and not isinstance(inner, nn.Embedding):
            found.append(name)
    return tuple(found)


def _around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


class _Maker:
    """Decides layer by layer."""

    def __init__(self, module: nn.Module, size: int, overrides: dict[str, Override]) -> None:
        self.module, self.size, self.overrides = module, size, overrides
        self.layers: dict[str, Layer] = {}
        self.whole: dict[str, str] = {}
        self.faults: list[str] = []
        self.heads: list[int] = []
        """Numbers that the size has to divide."""
        self.modules = dict(module.named_modules())
        self.found = find_layers(module)

    def run(self) -> None:
        """Fills `layers` and `whole`."""
        found = self.found
        self._check_overrides(found)
        for attention in found.attentions:
            self._attention(attention)
        for name, multihead in found.multiheads.items():
            self._multihead(name, multihead)
        for mlp in found.mlps:
            self._mlp(mlp)
        self._vocabulary(found)
        self._shipped(found)
        self._overridden(found)
        if self.faults:
            common = math.gcd(*self.heads)
            fit = [n for n in range(1, common + 1) if common % n == 0]
            raise TensorError("\n".join(self.faults) + f"\nSizes that work: {', '.join(map(str, fit))}.")

    def _says(self, name: str) -> Override | None:
        """Returns what `plan:` says of a module; whole for all in one that is."""
        for pattern, how in self.overrides.items():
            places = [*_around(name), name] if how == "whole" else [name]
            if any(fnmatchcase(place, pattern) for place in places):
                return how
        return None

    def _check_overrides(self, found: Found) -> None:
        for pattern, how in self.overrides.items():
            if how not in get_args(Override):
                raise TensorError(f"strategy.plan: '{pattern}: {how}': a layer is {', '.join(get_args(Override))}.")
            named = [n for n in self.modules if fnmatchcase(n, pattern)]
            if not named:
                known = sorted({_pattern(n) for n in (*found.linears, *found.embeddings)})
                raise TensorError(f"strategy.plan: no module is named '{pattern}'. Layers: {', '.join(known)}.")
            for name in named:
                fits = how == "whole" or (name in found.embeddings if how == "vocab" else name in found.linears)
                if not fits and not (how == "vocab" and name in found.linears):
                    kind = type(self.modules[name]).__name__
                    raise TensorError(f"strategy.plan: '{name}' is a {kind}, which cannot be cut as '{how}'.")

    def _put(self, linear: Linear, how: How, split: Split, why: str) -> None:
        if linear.own_forward and how == "shared heads":
            self.whole[linear.name] = f"{why}, and a forward of its own"
        elif self._says(linear.name) is None:
            self.layers[linear.name] = self._layer(linear, how, split, why)

    def _layer(self, linear: Linear, how: How, split: Split, why: str) -> Layer:
        return Layer(
            name=linear.name,
            how=how,
            split=split,
            transposed=linear.transposed,
            own_forward=linear.own_forward,
            why=why,
        )

    def _embedding(self, name: str, module: nn.Embedding, why: str) -> None:
        split = Split.even(module.num_embeddings, self.size)
        own = type(module).forward is not nn.Embedding.forward
        self.layers[name] = Layer(name=name, how="vocab", split=split, own_forward=own, why=why)

    def _divides(self, name: str, heads: int, key_heads: int) -> bool:
        self.heads.append(heads)
        if heads % self.size:
            keys = f" ({key_heads} of keys)" if key_heads != heads else ""
            self.faults.append(f"tensor: '{name}' has {heads} heads{keys}, which do not divide by size {self.size}.")
            return False
        return True

    def _attention(self, a: Attention) -> None:
        projections = [x for x in (a.fused, a.queries, a.keys, a.values, a.out) if x is not None]
        if all(self._says(x.name) is not None for x in projections) or not self._divides(a.name, a.heads, a.key_heads):
            return
        size, width = self.size, a.width
        queries = Split.even(a.heads * width, size, width)
        keys = Split.even(a.key_heads * width, size, width)
        whole = a.key_heads % size != 0
        if whole:
            keys = _used_heads(a.heads, a.key_heads, size).scaled(width)
        heads = f"{a.heads} heads" if a.heads == a.key_heads else f"{a.heads} heads, {a.key_heads} of keys"
        if a.fused is not None:
            self._fused(a, queries, keys, heads)
        else:
            assert a.queries is not None and a.keys is not None and a.values is not None
            self._put(a.queries, "column", queries, heads)
            for layer in (a.keys, a.values):
                why = f"{a.key_heads} heads of keys for {size} ranks" if whole else heads
                self._put(layer, "shared heads" if whole else "column", keys, why)
        self._put(a.out, "row", queries, heads)

    def _fused(self, a: Attention, queries: Split, keys: Split, heads: str) -> None:
        assert a.fused is not None
        if a.fused.own_name in PER_HEAD and a.heads == a.key_heads:
            self._put(a.fused, "column", Split.even(3 * queries.size, self.size, 3 * a.width), heads)
            return
        how: How = "column" if keys.once else "shared heads"
        self._put(a.fused, how, Split.fused([queries, keys, keys]), heads)

    def _multihead(self, name: str, module: Any) -> None:
        if self._says(name) is None and self._divides(name, module.num_heads, module.num_heads):
            width = module.embed_dim // module.num_heads
            split = Split.even(module.embed_dim, self.size, width)
            self.layers[name] = Layer(name=name, how="attention", split=split, why=f"{module.num_heads} heads")

    def _mlp(self, mlp: Any) -> None:
        split = Split.even(mlp.down.inputs, self.size)
        if mlp.down.inputs < self.size:
            self.whole |= {x.name: f"{mlp.down.inputs} wide, for {self.size} ranks" for x in (*mlp.up, mlp.down)}
            return
        why = f"{mlp.down.inputs} wide" + (", not equal on all ranks" if mlp.down.inputs % self.size else "")
        for layer in mlp.up:
            self._put(layer, "column", Split.fused([split] * mlp.blocks) if mlp.blocks > 1 else split, why)
        self._put(mlp.down, "row", split, why)

    def _vocabulary(self, found: Found) -> None:
        for name, embedding in found.embeddings.items():
            words = embedding.num_embeddings
            if words < self.size or self._says(name) is not None:
                self.whole[name] = f"{words} words" if words < self.size else "plan"
                continue
            self._embedding(name, embedding, f"{words} words")
        for linear in found.heads.values():
            if linear.outputs >= self.size:
                self._put(linear, "head", Split.even(linear.outputs, self.size), f"{linear.outputs} words")
            tied = [n for n, e in found.embeddings.items() if e.weight is linear.module.weight]
            if any((n in self.layers) != (linear.name in self.layers) for n in tied):
                # One parameter: both or none.
                for name in (linear.name, *tied):
                    self.layers.pop(name, None)
                    self.whole[name] = "tied to a layer that is whole"

    def _shipped(self, found: Found) -> None:
        """Takes what the plan of a transformers model says of layers that were not recognised."""
        shipped = getattr(self.module, "_tp_plan", None)
        prefix = ""
        if not isinstance(shipped, Mapping):
            for name, inner in self.modules.items():
                if isinstance(getattr(inner, "_tp_plan", None), Mapping) and name:
                    shipped, prefix = inner._tp_plan, f"{name}."
                    break
        for name, linear in found.linears.items():
            if name in self.layers or name in self.whole or not isinstance(shipped, Mapping):
                continue
            for pattern, style in shipped.items():
                how = _SHIPPED.get(style)
                if how is not None and fnmatchcase(name, f"{prefix}{pattern}"):
                    size = linear.outputs if how == "column" else linear.inputs
                    self._put(linear, how, Split.even(size, self.size), "the model's tp_plan")  # type: ignore[arg-type]
                    break

    def _overridden(self, found: Found) -> None:
        for name in (*found.linears, *found.embeddings):
            how = self._says(name)
            if how is None or how == "whole":
                continue
            if name in found.embeddings:
                self._embedding(name, found.embeddings[name], "plan")
                continue
            linear = found.linears[name]
            split = Split.even(linear.inputs if how == "row" else linear.outputs, self.size)
            kind: How = "head" if how == "vocab" else how  # type: ignore[assignment]
            self.layers[name] = self._layer(linear, kind, split, "plan")

    def rest(self, found: Found, cuts: Collection[str]) -> None:
        """Says of every module with parameters that are whole why they are."""
        for name, module in self.modules.items():
            own = [n for n, _ in module.named_parameters(name, recurse=False)]
            part_of_layer = any(around in self.layers for around in ("", *_around(name)))  # of an nn.MultiheadAttention
            if name in self.layers or name in self.whole or part_of_layer or all(n in cuts for n in own):
                continue
            self.whole[name] = "plan" if self._says(name) == "whole" else self._why_whole(name, module, found)

    def _why_whole(self, name: str, module: nn.Module, found: Found) -> str:
        around = next((found.left[p] for p in (name, *_around(name)) if p in found.left), None)
        if around is not None:
            return around
        if isinstance(module, nn.Embedding):
            return "not of words"
        if name in found.linears:
            return "no pair of layers, one given what the other makes"
        matrices = any(p.dim() > 1 for p in module.parameters(recurse=False))
        return f"{type(module).__name__} is not a layer that is known" if matrices else "no matrix"


def _used_heads(heads: int, key_heads: int, size: int) -> Split:
    """Returns which heads of keys each rank needs for its heads of queries; some are on several."""
    each, mine = heads // key_heads, heads // size
    ranges = tuple((((r * mine) // each, ((r + 1) * mine - 1) // each + 1),) for r in range(size))
    return Split(key_heads, ranges)
