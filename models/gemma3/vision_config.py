"""The vision tower of Gemma 3 4B, 12B and 27B as a literal, and read from a `config.json`."""

from dataclasses import dataclass
from math import isqrt
from typing import Any

from jaxattn.models.gemma3.errors import UnsupportedModelError
from jaxattn.spec import check_positive_float, check_positive_int

BEGIN_OF_IMAGE = 255_999
END_OF_IMAGE = 256_000
IMAGE = 262_144  # stands for one embedding of an image; the vocabulary ends before it
_MAX_LAYERS = 1024  # more is a damaged file

_SIZES = (
    "image_size",
    "patch_size",
    "embed_dim",
    "mlp_dim",
    "num_layers",
    "num_heads",
    "tokens_per_image",
)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A SigLIP tower and its pooling. The defaults are what all three published sizes have.

    A square image of `image_size` pixels a side is cut into square patches; blocks of patches are
    averaged, so that `tokens_per_image` are left.
    Source: Zhai et al., 2023 (SigLIP); Gemma 3 technical report, 2025.
    """

    image_size: int = 896
    patch_size: int = 14
    embed_dim: int = 1152
    mlp_dim: int = 4304
    num_layers: int = 27
    num_heads: int = 16
    layer_norm_eps: float = 1e-6
    tokens_per_image: int = 256

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_positive_int(f"vision {name}", getattr(self, name))
        check_positive_float("vision layer_norm_eps", self.layer_norm_eps)
        if self.num_layers > _MAX_LAYERS:
            raise ValueError(f"vision num_layers={self.num_layers}: expected at most {_MAX_LAYERS}")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}"
            )
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"vision embed_dim={self.embed_dim} is not a multiple of num_heads={self.num_heads}"
            )
        if self.tokens_per_side**2 != self.tokens_per_image:
            raise ValueError(f"tokens_per_image={self.tokens_per_image} is not a square")
        if self.patches_per_side % self.tokens_per_side:
            raise ValueError(
                f"{self.patches_per_side} patches a side cannot be pooled to "
                f"{self.tokens_per_side} tokens a side"
            )

    @property
    def patches_per_side(self) -> int:
        """Patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens_per_side(self) -> int:
        """Tokens along a side of the image."""
        return isqrt(self.tokens_per_image)


_HF_DEFAULTS: dict[str, Any] = {  # transformers', for keys that a config.json leaves out
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-6,
}
_HF_ONLY: dict[str, Any] = {  # the value with which our tower is the same, transformers' default
    "model_type": ("siglip_vision_model", "siglip_vision_model"),
    "hidden_act": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "num_channels": (3, 3),
    "vision_use_head": (False, True),
}
_HF_TOKENS = {
    "boi_token": BEGIN_OF_IMAGE,
    "eoi_token": END_OF_IMAGE,
    "image_token": IMAGE,
}


def vision_from_hf(config_json: dict[str, Any]) -> VisionConfig | None:
    """The tower of a Hugging Face `config.json` (transformers v4 or v5); None without one.

    Raises UnsupportedModelError for another tower, other image tokens, or an option that would
    change the result.
    """
    vision = config_json.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, dict):
        raise UnsupportedModelError(f"config.json has vision_config={vision!r}, expected an object")
    for name, (only, default) in _HF_ONLY.items():
        value = vision.get(name, default)
        if value != only:
            raise UnsupportedModelError(
                f"config.json: {name} of vision_config is {value!r}; only {only!r} is implemented"
            )
    for token, only in _HF_TOKENS.items():
        for name in (f"{token}_index", f"{token}_id"):
            if config_json.get(name) not in (only, None):
                raise UnsupportedModelError(
                    f"config.json has {name}={config_json[name]!r}; Gemma 3's is {only}"
                )

    def get(name: str) -> Any:
        value = vision.get(name)
        return _HF_DEFAULTS[name] if value is None else value

    tokens_per_image = config_json.get("mm_tokens_per_image")
    return VisionConfig(
        image_size=get("image_size"),
        patch_size=get("patch_size"),
        embed_dim=get("hidden_size"),
        mlp_dim=get("intermediate_size"),
        num_layers=get("num_hidden_layers"),
        num_heads=get("num_attention_heads"),
        layer_norm_eps=float(get("layer_norm_eps")),
        tokens_per_image=256 if tokens_per_image is None else tokens_per_image,
    )
