"""How Gemma 3's weights are cut over devices that share the heads: rules as data."""

from jax.sharding import PartitionSpec

from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.weights import Axis, Quantization, weight_table

# Logical axes that are cut; the others are whole on every device.
RULES: frozenset[Axis] = frozenset({"vocab", "q_heads", "kv_heads", "mlp"})


def weight_specs(
    config: Gemma3Config, axis: str, size: int, quantize: Quantization | None = None
) -> dict[str, PartitionSpec]:
    """The cut of every weight over mesh axis `axis` of `size` devices. Scales go with their rows.

    Raises ValueError if heads, hidden units or vocabulary are not a multiple of `size`.
    """
    counts = {
        "kv heads": config.num_kv_heads,
        "query heads": config.num_q_heads,
        "hidden units": config.mlp_dim,
        "vocabulary entries": config.vocab_size,
    }
    for name, count in counts.items():
        if count % size:
            fitting = [n for n in range(1, size) if not any(c % n for c in counts.values())]
            raise ValueError(
                f"{count} {name} cannot be shared by {size} devices; {max(fitting)} could"
            )
    return {
        name: PartitionSpec(*(axis if each in RULES else None for each in weight.axes))
        for name, weight in weight_table(config, quantize).items()
    }
