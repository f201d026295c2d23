"""How Gemma 3's weights are cut over devices that share the heads."""

from jax.sharding import PartitionSpec

from jaxattn.models.gemma3.checkpoint import expected_shapes
from jaxattn.models.gemma3.config import Gemma3Config

# Which axis of a weight `[out, in]` is cut: heads, hidden units, vocabulary. What is not named
# (norms) is on every device.
_CUT = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1, "embed": 0}


def weight_specs(config: Gemma3Config, axis: str, size: int) -> dict[str, PartitionSpec]:
    """The cut of every weight of `expected_shapes(config)` over mesh axis `axis` of `size` devices.

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
    specs = {}
    for name, shape in expected_shapes(config).items():
        cut = _CUT.get(name.rpartition(".")[2])
        specs[name] = PartitionSpec(*(axis if n == cut else None for n in range(len(shape))))
    return specs
