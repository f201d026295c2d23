"""Writes tests/data/gemma3_{text,vision}: what transformers computes for the tiny models.

Run by hand, where torch and transformers 5 are (the tests need neither's models):

    PYTHONPATH=. python tests/reference_transformers.py
"""

from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
)
from transformers.models.gemma3.modeling_gemma3 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from tests import tiny_text, tiny_vision

SURE_MARGIN = 1e-3  # below this two right float32 programs may choose differently


def fill(model: PreTrainedModel, arrays: dict[str, np.ndarray]) -> None:
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    left = model.load_state_dict(tensors, strict=False)
    assert left.missing_keys in ([], ["lm_head.weight"]) and not left.unexpected_keys, left
    model.tie_weights()


def greedy(model: PreTrainedModel, ids: np.ndarray, count: int, **images: Any) -> dict[str, Any]:
    """`count` tokens after a prompt, each from the whole text anew; and the whole text's logits."""
    tokens = ids.tolist()
    for left in range(count, -1, -1):
        inputs = {"input_ids": torch.tensor([tokens])}
        if images:
            inputs |= {"token_type_ids": (inputs["input_ids"] == tiny_vision.IMAGE).long()}
        logits = model(**inputs, **images, use_cache=False).logits[0]
        if left:
            first, second = logits[-1].topk(2).values.tolist()
            assert first - second > SURE_MARGIN, (len(tokens), first - second)
            tokens.append(int(logits[-1].argmax()))
    return {"greedy_ids": np.array(tokens[len(ids) :], np.int32), "logits": logits.numpy()}


def text_reference(name: str) -> dict[str, np.ndarray]:
    config_json = tiny_text.CONFIGS[name]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config_json, attn_implementation="eager")).eval()
    fill(model, tiny_text.hf_tensors(name))
    return greedy(model, tiny_text.prompt(name), tiny_vision.greedy_count(config_json))


def vision_reference(name: str, images: int) -> dict[str, np.ndarray]:
    config_json = tiny_vision.CONFIGS[name]
    config = Gemma3Config(**config_json, attn_implementation="eager")
    model = Gemma3ForConditionalGeneration(config).eval()
    fill(model, tiny_vision.hf_tensors(name))
    ids, _ = tiny_vision.prompt(name, images)
    pixels = tiny_vision.pixels(name, images).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    pictures = torch.from_numpy(np.ascontiguousarray(pixels))
    token_types = torch.from_numpy(ids == tiny_vision.IMAGE).long()[None]
    masks = create_masks_for_vision_model(
        config=model.config.text_config,
        inputs_embeds=torch.zeros(1, len(ids), 1),
        attention_mask=None,
        cache=None,
        position_ids=None,
        block_sequence_ids=get_block_sequence_ids_for_mask(token_types),
    )
    count = tiny_vision.greedy_count(config_json["text_config"])
    return {
        "image_embeddings": model.get_image_features(pictures).pooler_output.numpy(),
        **greedy(model, ids, count, pixel_values=pictures),
        "global_mask": masks["full_attention"][0, 0].numpy() == 0,
        "window_mask": masks["sliding_attention"][0, 0].numpy() == 0,
    }


@torch.no_grad()
def main() -> None:
    references = {tiny_text.DATA / name: text_reference(name) for name in tiny_text.CONFIGS}
    references |= {
        tiny_vision.DATA / f"{name}_{images}": vision_reference(name, images)
        for name, images in tiny_vision.CASES
    }
    for path, arrays in references.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path.with_suffix(".npz"), **arrays)
        print(path.name, {key: array.shape for key, array in arrays.items()})
        print(arrays["greedy_ids"].tolist())


if __name__ == "__main__":
    main()
