"""Adds LoRA adapters to the linear layers of a forward pass: unmerged, and several in one pass.

A linear layer computes ``W x`` for all rows at once, and each row adds ``scaling · B (A x)`` of its own adapter (LoRA, arXiv 2106.09685,
equation 3). The matrices of the adapters in a pass are stacked: one product gives ``A x`` for all of them, a mask clears what belongs to
the adapters of other rows, and the stacked Bs add the rest. With one adapter there is no mask. No row is gathered or moved.

If a row's bits must not depend on its neighbours (``batch_invariant``), adapters are not stacked but added one after the other, and a
masked product adds exact zeros.

Once an adapter is published, a model in which a trainer has injected PEFT's layers is computed without them: the engine reads the layers
below.

Axes: ``T`` rows of a product, ``R`` columns of stacked As.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.adapters import Adapter, base_of, linear_paths
from rollwright.inference.compute_threads import compute_threads

_STACKS = 8  # combinations of adapters whose stacked matrices are kept
_NO_LIMIT = 1 << 62
_pass = threading.local()  # ``terms`` of the forward pass that this thread computes; None or absent outside of one


# ------------------------------------------------------------------ forward passes of the engine


def bypass_injected(model: nn.Module) -> None:
    """Let PEFT's injected layers compute their base layer alone in forward passes of the engine; other passes stay as they are."""
    for module in model.modules():
        if base_of(module) is not module and "forward" not in vars(module):
            module.forward = MethodType(_base_in_engine, module)


def is_bypassed(module: Any) -> bool:
    """Return whether an injected layer computes its base alone in forward passes of the engine."""
    return getattr(vars(module).get("forward"), "__func__", None) is _base_in_engine


def carries_live_adapters(model: nn.Module) -> bool:
    """Return whether forward passes of the engine compute PEFT's injected layers."""
    return any(base_of(module) is not module and not is_bypassed(module) for module in model.modules())


def _base_in_engine(self: Any, *arguments: Any, **options: Any) -> Any:
    if getattr(_pass, "terms", None) is not None:
        return self.base_layer(*arguments, **options)
    return type(self).forward(self, *arguments, **options)


@contextlib.contextmanager
def engine_pass(terms: Sequence[Term] = ()) -> Iterator[None]:
    """Mark what this thread computes inside the block as a forward pass of the engine, with ``terms`` added to its linear layers."""
    before, _pass.terms = getattr(_pass, "terms", None), terms
    try:
        yield
    finally:
        _pass.terms = before


@dataclass
class _AddTerms:
    """A forward hook of a linear layer that adds the terms of the engine's forward passes to its output."""

    site: str

    def __call__(self, layer: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        for term in getattr(_pass, "terms", None) or ():
            x = arguments[0]
            term.add(self.site, x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1]))


def add_terms_in(model: nn.Module) -> None:
    """Let the linear layers of a model add the terms of the engine's forward passes, from now on."""
    for path in linear_paths(model):
        base = base_of(model.get_submodule(path))
        if not any(isinstance(hook, _AddTerms) for hook in base._forward_hooks.values()):
            base.register_forward_hook(_AddTerms(path))


# ------------------------------------------------------------------ products

#: Linear layers that are multiplied with the same rows: module path, and the outputs that are theirs.
Site = Sequence[tuple[str, slice]]


@dataclass(frozen=True)
class AddedColumns:
    """Columns of ``A x``, and what they add to: ``y[:, outputs] += u[:, columns] @ b_t``."""

    columns: slice
    outputs: slice
    b_t: Tensor


@dataclass
class LowRank:
    """The stacked matrices of one or several adapters for the layers that read the same rows.

    Attributes:
        a: ``[R, inputs]``.
        parts: what the columns of ``A x`` add to; they follow each other.
        owners: ``[R]``, index of the adapter that each column belongs to.
        most: maximum number of rows that are multiplied at once.
        threads: number of compute threads, or None for as many as the pass has.
    """

    a: Tensor
    parts: tuple[AddedColumns, ...]
    owners: tuple[int, ...]
    most: int = _NO_LIMIT
    threads: int | None = None

    @classmethod
    def of(cls, site: Site, adapters: Sequence[Adapter]) -> LowRank | None:
        """Stack the matrices of adapters, or return None if none of them adapts these layers."""
        rows, parts, owners = list[Tensor](), list[AddedColumns](), list[int]()
        for path, outputs in site:
            begin, columns = len(owners), list[Tensor]()
            for index, adapter in enumerate(adapters):
                if (factors := adapter.factors.get(path)) is not None:
                    rows.append(factors[0])
                    columns.append(factors[1])
                    owners += [index] * len(factors[0])
            if columns:
                b_t = torch.cat(columns, 1).t() if len(columns) > 1 else columns[0].t()
                parts.append(AddedColumns(slice(begin, len(owners)), outputs, b_t))
        if not rows:
            return None
        return cls(torch.cat(rows) if len(rows) > 1 else rows[0], tuple(parts), tuple(owners))

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        """Add the products with the rows of ``x`` to ``y`` in place.

        Args:
            x: ``[T, inputs]``.
            y: ``[T, outputs]``, with outputs next to each other in memory.
            mask: ``[T, R]``, 1 where a column belongs to the row's adapter. None if all rows have the one adapter.
        """
        if len(x) <= self.most and self.threads is None:
            self._add_at_once(x, y, mask)
            return
        with contextlib.nullcontext() if self.threads is None else compute_threads(self.threads):
            masks = itertools.repeat(None) if mask is None else mask.split(self.most)
            for some, other, masked in zip(x.split(self.most), y.split(self.most), masks, strict=False):
                self._add_at_once(some, other, masked)

    def _add_at_once(self, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        if x.dtype != self.a.dtype:
            self._add_in_float32(x, y, mask)
            return
        u = F.linear(x, self.a)
        if mask is not None:
            u.mul_(mask)
        if len(self.parts) == 1:
            part = self.parts[0]
            (y if part.b_t.shape[1] == y.shape[1] else y[:, part.outputs]).addmm_(u, part.b_t)
            return
        for part in self.parts:
            y[:, part.outputs].addmm_(u[:, part.columns], part.b_t)

    def _add_in_float32(self, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        """Do the same if the model computes in 16 bits: the sum is rounded once, as in PEFT."""
        u = F.linear(x.to(self.a.dtype), self.a)
        if mask is not None:
            u.mul_(mask)
        for part in self.parts:
            y[:, part.outputs] += u[:, part.columns] @ part.b_t


@dataclass
class Term:
    """What one or several adapters add to the linear layers in a forward pass.

    Attributes:
        products: the products by site.
        owners: ``[T]``, index of each row's adapter, or -1; None if all rows have the one adapter.
        repeats: number of consecutive rows that belong to one sequence. A layer that computes only one row of each sequence, such as the
            head, gets one of them.
    """

    products: dict[Hashable, LowRank]
    owners: Tensor | None
    repeats: int = 1
    _masks: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def add(self, site: Hashable, x: Tensor, y: Tensor) -> None:
        """Add the products with the rows ``x`` at a site to ``y`` in place."""
        if (product := self.products.get(site)) is not None:
            product.add(x, y, self._mask(product, len(x)))

    def selected(self, rows: Tensor) -> Term:
        """Return the term for some of the rows."""
        return Term(self.products, None if self.owners is None else self.owners.index_select(0, rows))

    def _mask(self, product: LowRank, rows: int) -> Tensor | None:
        if self.owners is None:
            return None
        if (mask := self._masks.get((rows, product.owners))) is None:
            owners = self.owners if len(self.owners) == rows else self.owners[:: self.repeats]
            if len(owners) != rows:
                raise EngineError(f"A layer gets {rows} rows for {len(owners)} tokens, and its adapters differ between them.")
            columns = torch.tensor(product.owners, device=owners.device)
            mask = self._masks[rows, product.owners] = (owners[:, None] == columns).to(product.a.dtype)
        return mask


class AdapterStacks:
    """The stacked matrices of the combinations of adapters that have been computed lately.

    Args:
        sites: the layers of the model that read the same rows, by the name of the site.
        together: stack the adapters of a pass. If False, each is added by itself.

    Attributes:
        limit: sets with how many rows and threads a product may be computed.
    """

    def __init__(self, sites: dict[Hashable, Site], together: bool) -> None:
        self._sites, self._together = sites, together
        self._stacks: OrderedDict[tuple[int, ...], dict[Hashable, LowRank]] = OrderedDict()
        self.limit: Callable[[LowRank], None] | None = None

    def products(self, adapters: Sequence[Adapter]) -> dict[Hashable, LowRank]:
        """Return the products of a combination of adapters by site."""
        keys = tuple(adapter.key for adapter in adapters)
        if (known := self._stacks.get(keys)) is None:
            made = {name: LowRank.of(site, adapters) for name, site in self._sites.items()}
            known = {name: product for name, product in made.items() if product is not None}
            if self.limit is not None:
                for product in known.values():
                    self.limit(product)
            while len(self._stacks) >= _STACKS:
                self._stacks.popitem(last=False)
            self._stacks[keys] = known
        self._stacks.move_to_end(keys)
        return known

    def terms(self, of_rows: Sequence[Adapter | None], repeats: Sequence[int] | int, rows: int) -> tuple[Term, ...]:
        """Return what adapters add in a pass.

        Args:
            of_rows: adapter of each sequence, or None.
            repeats: number of tokens of each sequence, or of all.
            rows: number of computed rows, including padding after them.
        """
        adapters = list(dict.fromkeys(adapter for adapter in of_rows if adapter is not None))
        if not adapters:
            return ()
        if len(adapters) == 1 and None not in of_rows:
            return (Term(self.products(adapters), None),)
        numbers = {adapter: index for index, adapter in enumerate(adapters)}
        owners = torch.tensor([-1 if adapter is None else numbers[adapter] for adapter in of_rows])
        each = repeats if isinstance(repeats, int) else 1
        owners = owners.repeat_interleave(repeats if isinstance(repeats, int) else torch.tensor(repeats))
        owners = F.pad(owners, (0, rows - len(owners)), value=-1).to(next(iter(adapters[0].factors.values()))[0].device)
        if self._together:
            return (Term(self.products(adapters), owners, each),)
        return tuple(
            Term(self.products([adapter]), torch.where(owners == index, 0, -1), each) for index, adapter in enumerate(adapters)
        )

    def forget(self, keys: Iterable[int]) -> None:
        """Free the matrices of combinations with any of these adapters."""
        gone = set(keys)
        for known in [known for known in self._stacks if gone & set(known)]:
            del self._stacks[known]
