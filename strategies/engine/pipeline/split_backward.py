"""A stage's backward with the gradients of its weight matrices apart: taken at once, or later, when nothing waits.

The stage before waits for the gradient of this stage's input, nobody for those of its weights (Qi et al. 2023, Zero
Bubble Pipeline Parallelism, arXiv 2401.10241, section 2).

[Note: products apart] Backward of `y = x w` is two products, `dy w^T` and `x^T dy`, in one node of autograd's graph,
which computes only what leads to the leaves that it is asked for. So it is asked for the input and for every weight but
those that are the second factor of a product; a hook of the node takes `x` and `dy` on their way. The second product is
then computed without autograd, by the same kernel, and added to the gradients where they lie (`add_product`), for which
a tensor of its own would take three more passes over memory. What is not known as such a product, biases and norms, a
weight that is used twice or that is reached in another way, gets its gradient with the input's. So the graph runs once,
and everything in it that is not needed for products is free when the input's gradient is there.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

_FACTORS = {"AddmmBackward0": (2, "mat1"), "MmBackward0": (1, "self"), "BmmBackward0": (1, "self")}
"""Products: at which of a node's edges the second factor is, and under which name it keeps the first one."""
_BY_THEMSELVES = ("CheckpointFunctionBackward",)
"""Nodes that run a backward inside, and refuse to be in one that is asked for some leaves only."""
_LONGEST = 8
"""Operations between a weight and the product that it is a factor of: transposed, cast."""


class Gradients(Protocol):
    """Where gradients go that autograd does not compute."""

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a leaf is a parameter of the stage."""

    def add_product(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> bool:
        """Adds `left @ right` to a weight's gradient; False: it has to come by autograd, hooks wait for it."""


class _Product:
    """A node `x @ w`, and how its second factor comes from a leaf, a weight."""

    def __init__(self, node: Any, factor: str, leaf: Any, edge: GradientEdge, transposed: bool) -> None:
        self.node = node
        self.factor = factor
        self.leaf = leaf
        self.edge = edge
        """What the gradient is handed to, behind the transposition."""
        self.transposed = transposed

    def taken_apart(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of the gradient at `edge`, as autograd has them. Args: gradient: of the product."""
        first = getattr(self.node, f"_saved_{self.factor}")
        return (gradient.mT, first.conj()) if self.transposed else (first.mH, gradient)


class SplitBackward:
    """The backward of one micro-batch on one stage. See [Note: products apart].

    Args:
        output: the stage's output or its loss.
        gradient: of the output; None: the output is a loss.
        received: the stage's input; None: the stage has none.
        gradients: of the stage's weights.
        at_once: a product's second gradient follows its first one, so that nothing is kept.
    """

    def __init__(
        self,
        output: Tensor,
        gradient: Tensor | None,
        received: Tensor | None,
        gradients: Gradients,
        at_once: bool = False,
    ) -> None:
        self._output: Tensor | None = output
        self._gradient = gradient
        self._received = received
        self._gradients = gradients
        self._at_once = at_once
        self._kept: list[tuple[GradientEdge, Tensor, Tensor]] = []
        """Factors of gradients, and what they are of. No node of the graph, which would keep the others."""
        self._edges: list[tuple[GradientEdge, Tensor]] = []

    def input(self) -> Tensor | None:
        """Computes the gradient of the input, and returns it; those of weights that are no factors arrive."""
        output, self._output = self._output, None
        assert output is not None
        received = self._received
        plan = None
        if output.grad_fn is not None:
            with torch._C.DisableTorchFunctionSubclass():
                plan = _plan(output.grad_fn, received, self._gradients.is_weight)
        if plan is None:
            torch.autograd.backward(output, self._gradient)
        else:
            leaves, products = plan
            handles = [product.node.register_prehook(self._taking(product)) for product in products]
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    torch.autograd.backward(output, self._gradient, inputs=leaves)
            finally:
                for handle in handles:
                    handle.remove()
            if self._at_once:
                self.weight()
        if received is None:
            return None
        gradient, received.grad = received.grad, None
        return gradient

    def weight(self) -> None:
        """Computes the gradients of the weights that are left."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for edge, left, right in kept:
                self._add(edge, left, right)
        kept.clear()
        edges, self._edges = self._edges, []
        if edges:
            torch.autograd.backward([edge for edge, _ in edges], [gradient for _, gradient in edges])

    def kept(self) -> Iterator[Tensor]:
        """Yields what is kept for the weights' gradients."""
        for _, left, right in self._kept:
            yield from (left, right)

    def _taking(self, product: _Product) -> Callable[[tuple[Tensor | None, ...]], None]:
        def take(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None:
                return
            factors = product.taken_apart(gradient)
            if self._at_once:
                self._add(product.edge, *factors)
            else:
                self._kept.append((product.edge, *factors))

        return take

    def _add(self, edge: GradientEdge, left: Tensor, right: Tensor) -> None:
        node: Any = edge.node
        if type(node).__name__ == "AccumulateGrad":
            with torch._C.DisableTorchFunctionSubclass():
                weight = node.variable
            if self._gradients.add_product(weight, left, right):
                return
        self._edges.append((edge, left @ right))


def _plan(
    root: Node, received: Tensor | None, is_weight: Callable[[Tensor], bool]
) -> tuple[list[Tensor], list[_Product]] | None:
    """Returns the leaves whose gradients the backward from `root` is asked for, and the products left out of it.

    Returns None where it cannot be taken apart.
    """
    leads: dict[Any, bool] = {}
    """Whether a node leads to a leaf that is asked for: only such nodes run."""
    asked: dict[Any, None] = {}
    products: list[_Product] = []
    stack: list[tuple[Any, _Product | None, list[Any] | None]] = [(root, None, None)]
    while stack:
        node, product, below = stack.pop()
        if below is not None:
            leads[node] = any(leads[other] for other in below)
            if product is not None and leads[node]:
                products.append(product)
            elif product is not None:
                asked[product.leaf] = None
                leads[node] = leads[product.leaf] = True
            continue
        if node in leads:
            continue
        name = type(node).__name__
        if name in _BY_THEMSELVES:
            return None
        leads[node] = name == "AccumulateGrad"
        if leads[node]:
            asked[node] = None
            continue
        edges = node.next_functions
        product = _product(node, name, edges, received, is_weight) if name in _FACTORS else None
        apart = -1 if product is None else _FACTORS[name][0]
        below = [other for at, (other, _) in enumerate(edges) if other is not None and at != apart]
        stack.append((node, product, below))
        stack.extend((other, None, None) for other in below)
    uses: dict[Any, int] = {}
    for product in products:
        uses[product.leaf] = uses.get(product.leaf, 0) + 1
    for leaf, times in uses.items():
        if times > 1:
            asked[leaf] = None
    return [leaf.variable for leaf in asked], [product for product in products if product.leaf not in asked]


def _product(
    node: Any,
    name: str,
    edges: tuple[tuple[Any, int], ...],
    received: Tensor | None,
    is_weight: Callable[[Tensor], bool],
) -> _Product | None:
    """Returns a node's product, if its second factor comes from a weight by itself and its first one can be had."""
    at, factor = _FACTORS[name]
    start, index = edges[at]
    if start is None or (name == "AddmmBackward0" and node._saved_alpha != 1):
        return None
    transposed = type(start).__name__ == "TBackward0"
    if transposed:
        start, index = start.next_functions[0]
    leaf = start
    for _ in range(_LONGEST):
        if type(leaf).__name__ == "AccumulateGrad":
            break
        after = leaf.next_functions
        if len(after) != 1 or after[0][0] is None:
            return None
        leaf = after[0][0]
    else:
        return None
    if leaf.variable is received or not is_weight(leaf.variable) or _is_recomputed(node, factor):
        return None
    return _Product(node, factor, leaf, GradientEdge(start, index), transposed)


def _is_recomputed(node: Any, factor: str) -> bool:
    """Whether a saved tensor is recomputed when it is asked for, which may be once only."""
    hook = getattr(node, f"_raw_saved_{factor}").unpack_hook
    return getattr(getattr(hook, "outer", hook), "__module__", None) == "torch.utils.checkpoint"
