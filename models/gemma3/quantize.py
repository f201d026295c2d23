"""int8 weights: every row of a matrix `[out, in]` as whole numbers times one scale.

A row is what one output of a product, or one token of the vocabulary, is made of. So one large
output costs the others nothing, and a product is `(x values^T) * scale`: the scale comes after it.

Our own instead of qwix (0.1.8): that quantises a model already on its devices, or whole arrays,
where a checkpoint has to be read block by block, and it intercepts dot products of which
`linear.project` makes none for a single row on CPU; 14,000 lines stand against these few.
"""

import numpy as np
from jaxtyping import Float32, Int8

_LARGEST = 127  # symmetric: -128 is not used


def quantize_rows(
    values: Float32[np.ndarray, "rows columns"],
) -> tuple[Int8[np.ndarray, "rows columns"], Float32[np.ndarray, "rows"]]:
    """`(whole, scale)` with `whole * scale[:, None]` within `scale / 2` of the finite values.

    A row of zeros has scale 1.
    """
    scale = np.abs(values).max(axis=1) / np.float32(_LARGEST)
    scale[scale == 0] = 1
    # Subnormal scales round: the quotient may exceed the largest number.
    whole = np.clip(np.rint(values / scale[:, None]), -_LARGEST, _LARGEST)
    return whole.astype(np.int8), scale
