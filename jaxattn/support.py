"""The support table, made from the registry's rows: what is listed is tested, the rest refused."""

from jaxattn.kernels.pallas.tiles import CHIPS
from jaxattn.registry import ANY, CAPABILITIES, GPUS, Capabilities


def support_table() -> str:
    """The capability table of all backends as GitHub Markdown, one column per backend."""
    rows = list(CAPABILITIES.values())
    lines = [
        "| | " + " | ".join(f"`{row.backend}`" for row in rows) + " |",
        "| --- |" + " --- |" * len(rows),
    ]
    cells = [_cells(row) for row in rows]
    for name in cells[0]:
        lines.append(f"| {name} | " + " | ".join(column[name] for column in cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: Capabilities) -> dict[str, str]:
    """One backend's column, by row title."""

    def flag(value: bool) -> str:
        return "yes" if value else "-"

    def names(values: tuple | None) -> str:
        if values is ANY:
            return "any"
        return ", ".join(map(str, values)) or "-"

    def limits(values: tuple[int, int] | None) -> str:
        return "any" if values is ANY else f"{values[0]} to {values[1]}"

    platforms = names(row.platforms if row.chips is ANY else row.chips)
    if row.compute_capabilities is not ANY:
        served = [
            (name.upper(), each in row.compute_capabilities) for name, (_, each) in GPUS.items()
        ]
        platforms = ", ".join(name for name, yes in served if yes)
        platforms += f" (not {', '.join(name for name, yes in served if not yes)}, nor AMD)"
    cap = row.max_soft_cap
    pages, most = limits(row.page_sizes), row.max_table_entries
    with_float8 = [name for name in row.chips or () if CHIPS[name].float8]
    float8 = f" (float8: {', '.join(with_float8)})" if with_float8 else ""
    if row.page_sizes_of_two:
        pages += " (powers of two)"
    if row.quantized_page_multiple > 1:
        pages += f" (multiples of {row.quantized_page_multiple} in 8 bits)"
    return {
        "what": row.what,
        "platforms": platforms,
        "sliding window": flag(row.sliding_window),
        "soft cap": flag(row.soft_cap) + ("" if cap is ANY else f" (up to {cap:,.0f})"),
        "sinks": flag(row.sinks),
        "image spans": names(tuple(rule for rule in row.image_rules if rule != "none")),
        "not causal": flag(row.non_causal),
        "query heads per kv head": limits(row.q_heads_per_kv_head),
        "head dims": names(row.head_dims),
        "page sizes": pages,
        "page table entries": "any" if most is ANY else f"up to {most}",
        "query dtypes": names(row.query_dtypes),
        "cache dtypes": names(row.kv_dtypes) + float8,
        "tables of live pages only": flag(row.first_page),
        "layers that share KV": flag(row.shared_kv),
    }
