"""Finds the layers of a model that can be cut, by structure and names.

Nothing depends on a right guess but speed: what is between a column-parallel and a row-parallel layer runs on tensors
that know how they are divided ([Note: logical shapes], sharded.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_QUERIES = (
    "q_proj",
    "query",
    "q",
    "wq",
    "to_q",
    "q_lin",
    "query_proj",
    "q_linear",
    "linear_q",
    "w_q",
    "fc_q",
    "queries",
)
_KEYS = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj", "k_linear", "linear_k", "w_k", "fc_k", "keys")
_VALUES = ("v_proj", "value", "v", "wv", "to_v", "v_lin", "value_proj", "v_linear", "linear_v", "w_v", "fc_v", "values")
_FUSED = ("qkv", "c_attn", "qkv_proj", "wqkv", "to_qkv", "in_proj", "attn_qkv", "qkv_linear", "proj_qkv", "w_qkv")
_FUSED += ("query_key_value", "attn_in", "w_pack", "attention_in", "fused_qkv")
PER_HEAD = ("query_key_value",)
"""Of these the outputs of each head lie together."""
_OUT = ("o_proj", "out_proj", "out", "o", "wo", "c_proj", "dense", "proj", "to_out", "output", "out_lin", "o_linear")
_OUT += ("attn_out", "proj_out", "linear_out", "attention_out", "resid_proj", "fc_o", "w_o", "output_proj", "linear_o")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head", "n_local_heads", "h")
_HEAD_WIDTH = (
    "head_dim",
    "attention_head_size",
    "d_head",
    "dim_head",
    "head_size",
    "d_k",
    "dim_per_head",
    "head_width",
)


@dataclass(frozen=True)
class Linear:
    """A layer that multiplies by a matrix, and its sizes."""

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    transposed: bool
    own_forward: bool = False
    """Whether its class computes in its own way: it is given tensors of logical shape, see [Note: cut parameters]."""

    @property
    def own_name(self) -> str:
        """Its name in the module around it."""
        return self.name.rpartition(".")[2].lower()


@dataclass
class Attention:
    """Projections around an attention; `fused` has queries, keys and values at once."""

    name: str
    heads: int
    key_heads: int
    width: int
    """Of one head."""
    out: Linear
    fused: Linear | None = None
    queries: Linear | None = None
    keys: Linear | None = None
    values: Linear | None = None


@dataclass
class MLP:
    """Layers of the same outputs (up, gate), and the one that is given these."""

    name: str
    up: list[Linear]
    down: Linear
    blocks: int = 1
    """2: gate and up are one layer."""


@dataclass
class Found:
    """What a model is made of, as far as it is known."""

    linears: dict[str, Linear] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    multiheads: dict[str, nn.MultiheadAttention] = field(default_factory=dict)
    mlps: list[MLP] = field(default_factory=list)
    embeddings: dict[str, nn.Embedding] = field(default_factory=dict)
    """Of words."""
    heads: dict[str, Linear] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Why a module that looked like one of these was left, by its name."""


def find_layers(model: nn.Module) -> Found:
    """Returns the layers of a model that can be cut."""
    found = Found(linears=dict(_linears(model)))
    taken: set[str] = set()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module).forward is nn.MultiheadAttention.forward:
            _multihead(name, module, found, taken)
    for name, module in modules.items():
        children = _children(name, module, found)
        if children:
            _attention(name, module, children, modules, found, taken)
    for name, module in modules.items():
        _mlps(name, module, found, taken)
    _words(model, found, taken)
    return found


def _linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or "forward" in vars(module):
            continue
        if isinstance(module, nn.Linear) and tuple(weight.shape) == (module.out_features, module.in_features):
            own = type(module).forward is not nn.Linear.forward
            yield name, Linear(name, module, weight.shape[1], weight.shape[0], False, own)
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            yield name, Linear(name, module, weight.shape[0], weight.shape[1], True)


def _children(name: str, module: nn.Module, found: Found) -> dict[str, Linear]:
    """Returns the layers right in a module, or alone in a Sequential in it (with dropout), by their names in it."""
    children = {}
    for own, child in module.named_children():
        full = f"{name}.{own}" if name else own
        if isinstance(child, nn.Sequential):
            inner = [n for n in _names(full, child) if n in found.linears]
            full = inner[0] if len(inner) == 1 else full
        if full in found.linears:
            children[own.lower()] = found.linears[full]
    return children


# --- attention


def _multihead(name: str, module: Any, found: Found, taken: set[str]) -> None:
    taken.add(f"{name}.out_proj" if name else "out_proj")
    if module.bias_k is not None or module.add_zero_attn:
        found.left[name] = "nn.MultiheadAttention with bias_kv or add_zero_attn"
        return
    found.multiheads[name] = module


def _attention(
    name: str,
    module: nn.Module,
    children: dict[str, Linear],
    modules: dict[str, nn.Module],
    found: Found,
    taken: set[str],
) -> None:
    pick = {kind: _first(children, names) for kind, names in (("q", _QUERIES), ("k", _KEYS), ("v", _VALUES))}
    fused = _first(children, _FUSED)
    separate = all(pick.values())
    if not separate and fused is None:
        return
    own = {x.name for x in (*pick.values(), fused) if x is not None}
    inputs = (pick["q"] or fused).inputs  # type: ignore[union-attr]
    heads, width = _number(name, _HEADS, modules), _number(name, _HEAD_WIDTH, modules, config=False)
    if separate:
        q, k, v = pick["q"], pick["k"], pick["v"]
        assert q is not None and k is not None and v is not None
        total = q.outputs
        if heads and total % heads == 0 and (not width or width * heads != total):
            width = total // heads
        elif width and total % width == 0:
            heads = total // width
        if not heads or not width or k.outputs % width or k.outputs != v.outputs:
            found.left[name] = "an attention whose number of heads is not known"
            return
        out = _out(name, children, modules, found, own | taken, total, inputs)
        if out is None:
            found.left[name] = "an attention without an output projection of its width"
            return
        attention = Attention(name, heads, k.outputs // width, width, out, None, q, k, v)
    else:
        assert fused is not None
        attention_or_reason = _fused(name, fused, heads, width, children, modules, found, taken)
        if isinstance(attention_or_reason, str):
            found.left[name] = attention_or_reason
            return
        attention = attention_or_reason
        own = {fused.name}
    if attention.heads % attention.key_heads:
        found.left[name] = f"{attention.heads} heads do not divide by {attention.key_heads} of keys"
        return
    found.attentions.append(attention)
    taken |= own | {attention.out.name}


def _fused(
    name: str,
    fused: Linear,
    heads: int | None,
    width: int | None,
    children: dict[str, Linear],
    modules: dict[str, nn.Module],
    found: Found,
    taken: set[str],
) -> Attention | str:
    out = _out(name, children, modules, found, {fused.name} | taken, None, fused.inputs)
    if out is None:
        return "an attention without an output projection of its width"
    total = out.inputs
    if heads and total % heads == 0:
        width = total // heads
    elif width and total % width == 0:
        heads = total // width
    rest = fused.outputs - total
    if not heads or not width or rest <= 0 or rest % (2 * width):
        return "an attention whose number of heads is not known"
    return Attention(name, heads, rest // (2 * width), width, out, fused)


def _first(children: dict[str, Linear], names: tuple[str, ...]) -> Linear | None:
    return next((children[n] for n in names if n in children), None)


def _number(name: str, names: tuple[str, ...], modules: dict[str, nn.Module], config: bool = True) -> int | None:
    """Returns a number that the module at `name`, its config, or a module around it has under one of these names."""
    while True:
        module = modules[name]
        places = [module] + ([module.config] if config and hasattr(module, "config") else [])
        for place in places:
            for attribute in names:
                value = getattr(place, attribute, None)
                if type(value) is int and value > 0:
                    return value
        if not name:
            return None
        name = name.rpartition(".")[0]


def _out(
    name: str,
    children: dict[str, Linear],
    modules: dict[str, nn.Module],
    found: Found,
    taken: set[str],
    inputs: int | None,
    outputs: int,
) -> Linear | None:
    """Returns the output projection: in the module itself, or beside it (as BERT has it)."""

    def fits(layer: Linear) -> bool:
        return layer.name not in taken and layer.outputs == outputs and inputs in (None, layer.inputs)

    candidates = [children[n] for n in _OUT if n in children]
    if name:
        parent = name.rpartition(".")[0]
        beside = [x for x in found.linears.values() if x.name.startswith(f"{parent}." if parent else "")]
        beside = [x for x in beside if not x.name.startswith(f"{name}.") and x.name.count(".") <= parent.count(".") + 2]
        here = bool(parent) and type(modules[parent]).__name__.lower().endswith("attention")
        candidates += [x for x in beside if here and x.own_name in _OUT]
    return next((x for x in candidates if fits(x)), None)


# --- the perceptron


def _mlps(name: str, module: nn.Module, found: Found, taken: set[str]) -> None:
    free = [x for x in _children(name, module, found).values() if x.name not in taken]
    if isinstance(module, nn.Sequential):
        _chain(
            name,
            [found.linears[n] for n in _names(name, module) if n in found.linears and n not in taken],
            found,
            taken,
        )
        return
    if len(free) < 2:
        # One layer in each of two modules side by side, as BERT has them.
        inner = [_children(f"{name}.{n}" if name else n, m, found) for n, m in module.named_children()]
        free = [next(iter(c.values())) for c in inner if len(c) == 1]
        free = [x for x in free if x.name not in taken and not isinstance(module, nn.ModuleList | nn.Sequential)]
        if not any(a.name.startswith(f"{name}." if name else "") for a in found.attentions):
            return
    if len(free) < 2:
        return
    first = free[0]
    shape = first.inputs, first.outputs
    down = [x for x in free[1:] if x.outputs == shape[0] and x.inputs in (shape[1], shape[1] / 2)]
    if not down or shape[0] == shape[1]:
        return
    last = down[-1] if len(free) == 2 else down[0]
    blocks = shape[1] // last.inputs
    up = [x for x in free if (x.inputs, x.outputs) == shape and x is not last]
    if blocks > 1 and len(up) > 1:
        return
    found.mlps.append(MLP(name, up, last, blocks))
    taken |= {x.name for x in up} | {last.name}


def _names(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{n}" if name else n for n, _ in module.named_children()]


def _chain(name: str, layers: list[Linear], found: Found, taken: set[str]) -> None:
    """Takes layers of a Sequential two by two, where one is given what the other makes."""
    place = 0
    while place + 1 < len(layers):
        up, down = layers[place : place + 2]
        if up.outputs != down.inputs:
            place += 1
            continue
        found.mlps.append(MLP(name, [up], down))
        taken |= {up.name, down.name}
        place += 2


# --- words


def _words(model: nn.Module, found: Found, taken: set[str]) -> None:
    embeddings = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            own = name.rpartition(".")[2].lower()
            if any(word in own for word in ("pos", "type", "segment", "wpe")):
                continue
            if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
                found.left[name] = "an embedding with max_norm, sparse or scale_grad_by_freq"
                continue
            embeddings[name] = module
    free = {n: x for n, x in found.linears.items() if n not in taken}
    for name, module in embeddings.items():
        found.embeddings[name] = module
        sizes = (module.embedding_dim, module.num_embeddings)
        fitting = [x for x in free.values() if (x.inputs, x.outputs) == sizes and not x.transposed]
        tied = [x for x in fitting if x.module.weight is module.weight]
        found.heads |= {x.name: x for x in tied or fitting[-1:]}
