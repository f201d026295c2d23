"""Writes tests/data/gemma3_vision: what transformers computes for the tiny multimodal models.

Run by hand, where torch and transformers 5 are (the tests need neither's models):

    PYTHONPATH=. python tests/reference_vision.py
"""

import numpy as np
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.modeling_gemma3 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from tests.tiny_vision import CASES, CONFIGS, DATA, IMAGE, hf_tensors, pixels, prompt


def load(name: str) -> Gemma3ForConditionalGeneration:
    config = Gemma3Config(**CONFIGS[name], attn_implementation="eager")
    model = Gemma3ForConditionalGeneration(config).eval()
    tensors = {key: torch.from_numpy(array) for key, array in hf_tensors(name).items()}
    left = model.load_state_dict(tensors, strict=False)
    assert left.missing_keys in ([], ["lm_head.weight"]) and not left.unexpected_keys, left
    model.tie_weights()
    return model


@torch.no_grad()
def reference(name: str, images: int) -> dict[str, np.ndarray]:
    model = load(name)
    ids, _ = prompt(name, images)
    pictures = torch.from_numpy(pixels(name, images)).permute(0, 3, 1, 2).contiguous()
    inputs = {
        "input_ids": torch.from_numpy(ids).long()[None],
        "token_type_ids": torch.from_numpy(ids == IMAGE).long()[None],
    }
    logits = model(**inputs, pixel_values=pictures).logits[0]
    masks = create_masks_for_vision_model(
        config=model.config.text_config,
        inputs_embeds=torch.zeros(1, len(ids), 1),
        attention_mask=None,
        cache=None,
        position_ids=None,
        block_sequence_ids=get_block_sequence_ids_for_mask(inputs["token_type_ids"]),
    )
    return {
        "image_embeddings": model.get_image_features(pictures).pooler_output.numpy(),
        "logits": logits.numpy(),
        "global_mask": masks["full_attention"][0, 0].numpy() == 0,
        "window_mask": masks["sliding_attention"][0, 0].numpy() == 0,
    }


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    for name, images in CASES:
        arrays = reference(name, images)
        np.savez_compressed(DATA / f"{name}_{images}.npz", **arrays)
        print(name, images, {key: array.shape for key, array in arrays.items()})
