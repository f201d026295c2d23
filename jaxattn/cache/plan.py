"""Which layers store their keys and values together: `group_layers(layers) -> CachePlan`.

Layers with equal storage form a group: one page table, one pool of pages. A group knows nothing
of what its layers see. Masks stay in the layers, whatever storage they end up in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from io import StringIO
from typing import Any

import jax
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from jaxattn.cache.sizing import check_max_len, demand
from jaxattn.spec import LayerSpec, StoreSpec, check_positive_int


def agreed[T](values: Iterable[T]) -> T | None:
    """The value that all agree on, else None: no assumption, never "the first one's".

    [512, 512] -> 512, [None, None] -> None, [512, None] -> None, [] -> None.
    """
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose pages live and die together. `layers` own storage in it, in model order."""

    store: StoreSpec
    layers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The layers as the model gave them, and the groups that store them. Static, hashable.

    Made by `group_layers`. A group is named by its index. `print(plan)` shows the bytes.
    """

    layers: tuple[LayerSpec, ...]
    groups: tuple[CacheGroup, ...]
    max_len: int

    def storage_of(self, layer_name: str) -> str:
        """The layer that owns the pages which `layer_name` reads: itself, or its donor."""
        owners = find_owners(self.layers)
        if layer_name not in owners:
            raise ValueError(f"{layer_name=} is not planned: the layers are {', '.join(owners)}")
        return owners[layer_name]

    def group_of(self, layer_name: str) -> int:
        """The index of the group whose pages `layer_name` reads."""
        owner = self.storage_of(layer_name)
        return next(index for index, group in enumerate(self.groups) if owner in group.layers)

    def readers(self, group: int) -> tuple[LayerSpec, ...]:
        """The layers that read a group's pages, those that share another's KV included."""
        owners = find_owners(self.layers)
        members = self.groups[group].layers
        return tuple(layer for layer in self.layers if owners[layer.name] in members)

    def bytes_per_token(self, group: int) -> int:
        """Bytes of one token's K and V over all layers of a group."""
        return _token_bytes(self.groups[group].store) * len(self.groups[group].layers)

    def page_bytes(self, group: int) -> int:
        """Bytes of one page over all layers of a group."""
        return self.bytes_per_token(group) * self.groups[group].store.page_size

    def bytes_per_sequence(self, length: int) -> int:
        """Bytes that a sequence holds while the last of its `length` tokens is decoded."""
        check_max_len(self, length)
        pages = demand(self, [(length - 1, length)])
        return sum(count * self.page_bytes(group) for group, count in enumerate(pages))

    def ideal_bytes(self, length: int) -> int:
        """Bytes of only the tokens that are seen: min(length, window), no page rounding.

        A layer whose KV is shared stores what the widest of its readers sees.
        """
        check_max_len(self, length)
        owners, stores = find_owners(self.layers), {each.name: each.store for each in self.layers}
        seen = dict.fromkeys(owners.values(), 0)
        for layer in self.layers:
            tokens = min(length, layer.mask.sliding_window or length)
            seen[owners[layer.name]] = max(seen[owners[layer.name]], tokens)
        return sum(_token_bytes(stores[owner]) * tokens for owner, tokens in seen.items())

    def waste(self, length: int) -> float:
        """The fraction of `bytes_per_sequence` that no query can see, 0 to 1."""
        return 1 - self.ideal_bytes(length) / self.bytes_per_sequence(length)

    def __rich__(self) -> RenderableType:
        groups = _table("group", "layers", "retention", "page", "bytes/page", "bytes/token")
        for index, group in enumerate(self.groups):
            groups.add_row(
                str(index),
                _describe(self.readers(index)),
                "all" if group.store.retention is None else f"{group.store.retention} tokens",
                f"{group.store.page_size} x {group.store.num_kv_heads} x "
                f"{group.store.head_dim} {group.store.dtype}",
                _size(self.page_bytes(index)),
                _size(self.bytes_per_token(index)),
            )
        sequence = _table("tokens", "bytes/sequence", "ideal", "waste")
        for length in sorted({max(1, self.max_len // part) for part in (64, 16, 4, 1)}):
            sequence.add_row(
                str(length),
                _size(self.bytes_per_sequence(length)),
                _size(self.ideal_bytes(length)),
                f"{self.waste(length):.1%}",
            )
        return Group(groups, "", sequence)

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=100, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


def group_layers(layers: Sequence[LayerSpec], *, hybrid: bool = True, max_len: int) -> CachePlan:
    """Group layers by what they store, for sequences of at most `max_len` tokens.

    `hybrid`: a group per distinct (retention, geometry). A windowed layer that states no
    retention keeps its window; one that reaches `max_len` keeps all. Otherwise every layer keeps
    all, so that windowed and global layers of equal geometry share a group. Masks, and so the
    outputs, are the same either way.

    A layer with `share_kv_from` stores nothing. Its donor keeps what the widest reader needs.

    Raises ValueError for no layers, duplicate names, a donor that is unknown or not earlier, and
    a shared layer of another geometry.
    """
    check_positive_int("max_len", max_len)
    layers = tuple(layers)
    if not layers:
        raise ValueError("layers is empty: a plan needs at least one LayerSpec")

    owners = find_owners(layers)
    needs: dict[str, dict[str, StoreSpec]] = {}  # of an owner: what each of its readers needs
    for layer in layers:
        store = replace(layer.store, retention=_retention(layer, hybrid=hybrid, max_len=max_len))
        needs.setdefault(owners[layer.name], {})[layer.name] = store
    members: dict[StoreSpec, list[str]] = {}
    for owner, stores in needs.items():
        members.setdefault(merge_stores(stores), []).append(owner)
    groups = (CacheGroup(store=store, layers=tuple(names)) for store, names in members.items())
    return CachePlan(layers=layers, groups=tuple(groups), max_len=max_len)


def find_owners(layers: Iterable[LayerSpec]) -> dict[str, str]:
    """For each layer the one that owns the pages it reads, through chains of sharing."""
    owners: dict[str, str] = {}
    for layer in layers:
        if layer.name in owners:
            raise ValueError(f"layer {layer.name!r}: two layers have this name")
        donor = layer.name if layer.share_kv_from is None else layer.share_kv_from
        if layer.share_kv_from is not None and donor not in owners:
            raise ValueError(
                f"layer {layer.name!r}: share_kv_from={donor!r} is not an earlier layer; "
                f"earlier are {', '.join(owners) or 'none'}"
            )
        owners[layer.name] = owners.get(donor, donor)
    return owners


def _retention(layer: LayerSpec, *, hybrid: bool, max_len: int) -> int | None:
    """How many past tokens one layer needs stored, None for all.

    Also right for bidirectional image spans and non-causal windows: keys that come after a query
    must be computed in one step with it, and tokens in flight are live whatever the retention.
    """
    stated = layer.store.retention
    kept = layer.mask.sliding_window if stated is None else stated
    keeps_all = not hybrid or kept is None or kept >= max_len
    return None if keeps_all else kept


def _equal(field: str, values: Mapping[str, Any]) -> Any:
    if len(set(values.values())) > 1:
        raise ValueError(f"layers that share KV need one {field}, got {dict(values)}")
    return next(iter(values.values()))


def _longest(field: str, values: Mapping[str, Any]) -> Any:
    return None if None in values.values() else max(values.values())


# How the stores of layers that read the same pages become one. Every field has a rule.
MERGE_RULES: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "page_size": _equal,
    "num_kv_heads": _equal,
    "head_dim": _equal,
    "dtype": _equal,
    "retention": _longest,
    "shards": _equal,
}


def merge_stores(stores: Mapping[str, StoreSpec]) -> StoreSpec:
    """One storage for all readers of the same pages, given as layer name -> what it needs."""
    names = {field.name for store in stores.values() for field in fields(store)}
    if unruled := names - MERGE_RULES.keys():
        raise TypeError(f"no merge rule for {sorted(unruled)} of StoreSpec: add it to MERGE_RULES")
    merged = {
        name: rule(name, {layer: getattr(store, name) for layer, store in stores.items()})
        for name, rule in MERGE_RULES.items()
    }
    return StoreSpec(**merged)


def _token_bytes(store: StoreSpec) -> int:
    """Bytes of one token in one layer: K, V, scales, and the padding of its heads to lanes."""
    page = jax.tree.leaves(store.pages(1))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in page) // store.page_size


def _describe(layers: Sequence[LayerSpec]) -> str:
    """For example "15 windowed (512), 3 global, 2 sharing"; the last are not counted twice."""
    own = [layer.mask.sliding_window for layer in layers if layer.share_kv_from is None]
    windows = sorted({window for window in own if window is not None})
    counts = {
        f"windowed ({', '.join(map(str, windows))})": sum(window is not None for window in own),
        "global": sum(window is None for window in own),
        "sharing": len(layers) - len(own),
    }
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def _table(*headers: str) -> Table:
    return Table(*headers, box=box.SIMPLE, show_edge=False, pad_edge=False)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.4g} GiB"
