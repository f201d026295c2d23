"""From text and images to the tokens that an engine takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxattn.engine.errors import PromptTooLongError
from jaxattn.engine.images import Image, PlacedImage
from jaxattn.models.gemma3.chat import IMAGE_MARKER, chat_images, render_chat
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.images import check_readable, load_image, preprocess
from jaxattn.models.gemma3.tokenizer import Tokenizer

_END = "<end_of_image>"
_PICTURE = f"\n\n{IMAGE_MARKER}{_END}\n\n"  # the image's tokens go in between


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's text as it was given, None for token ids; its tokens; its images in order."""

    text: str | None
    token_ids: list[int]
    images: tuple[PlacedImage, ...] = ()


class PromptEncoder:
    """Encodes prompts, with images where the model has a vision tower.

    Args:
        max_model_len: of prompts whose images alone are longer none is decoded.
        pan_and_scan: show a picture that is far from square in crops too, after the whole of it.
        allow_remote_images: fetch images by http(s).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Gemma3Config,
        *,
        max_model_len: int | None = None,
        pan_and_scan: bool = False,
        allow_remote_images: bool = False,
    ):
        if pan_and_scan and config.vision is None:
            raise ValueError("pan_and_scan=True: this model has no vision tower")
        self._tokenizer = tokenizer
        self._vocab_size = config.vocab_size
        self._vision = config.vision
        self._max_model_len = max_model_len
        self._pan_and_scan = pan_and_scan
        self._allow_remote = allow_remote_images
        if config.vision is not None:
            ids = tokenizer.encode(IMAGE_MARKER + _END, bos=False)
            if len(ids) != 2:
                raise ValueError(f"the tokenizer does not know {IMAGE_MARKER} and {_END}")
            self._begin = ids[0]

    def check_images(self) -> None:
        """Raise ImportError where pictures would come, and what reads them is not installed."""
        if self._vision is not None:
            check_readable(self._vision)

    def encode(self, text: str, images: Sequence[Any] | None = None) -> EncodedPrompt:
        """Tokens of a text, in which an IMAGE_MARKER stands for each of `images`.

        As transformers' processor has it. `images`: what `load_image` takes; None leaves markers
        as they are, tokens like others.

        Raises ValueError for images that this model cannot take, that do not fit the markers or
        cannot be read, TypeError for what is no image, ImportError without what reads them.
        """
        if not images and (images is None or IMAGE_MARKER not in text):
            return EncodedPrompt(text, self._tokenizer.encode(text))
        if self._vision is None:
            raise ValueError(
                "this model has no vision tower, and takes no images: they need the Hugging Face "
                "folder of a 4B, 12B or 27B, without images=False or --no-images"
            )
        if text.count(IMAGE_MARKER) != len(images):
            raise ValueError(
                f"{len(images)} images for {text.count(IMAGE_MARKER)} times {IMAGE_MARKER} in the "
                "text: each needs one, and a text that comes with images may not spell it otherwise"
            )
        least = len(images) * self._vision.tokens_per_image
        if self._max_model_len is not None and least >= self._max_model_len:
            raise PromptTooLongError(
                f"{len(images)} images are {least} tokens at least; prompt and answer have room "
                f"for {self._max_model_len} (max_model_len)"
            )
        views = [self._views(each) for each in images]
        before, *after = text.split(IMAGE_MARKER)
        shown = [_shown(len(own)) + rest for own, rest in zip(views, after, strict=True)]
        ids = self._tokenizer.encode(before + "".join(shown))
        return self._place(text, ids, [image for own in views for image in own])

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> EncodedPrompt:
        """Tokens of a conversation, see `render_chat`. Raises what `encode` raises."""
        text = render_chat(messages)
        return self.encode(text, chat_images(messages) or None)

    def _views(self, source: Any) -> list[Image]:
        """The whole picture, and its crops."""
        assert self._vision is not None
        picture = load_image(source, allow_remote=self._allow_remote)
        views = preprocess(picture, self._vision, pan_and_scan=self._pan_and_scan)
        return [Image.of(pixels, vocab_size=self._vocab_size) for pixels in views]

    def _place(self, text: str, ids: list[int], images: list[Image]) -> EncodedPrompt:
        """Put the tokens of each image after its marker."""
        assert self._vision is not None
        token_ids: list[int] = []
        placed: list[PlacedImage] = []
        for token in ids:
            token_ids.append(token)
            if token == self._begin:
                image, start = images[len(placed)], len(token_ids)
                token_ids += [image.token_id] * self._vision.tokens_per_image
                placed.append(PlacedImage(start, len(token_ids), image))
        assert len(placed) == len(images)
        return EncodedPrompt(text, token_ids, tuple(placed))


def _shown(num_views: int) -> str:
    """What the model reads of a picture: as transformers' `Gemma3Processor`."""
    if num_views == 1:
        return _PICTURE
    crops = " ".join([_PICTURE] * (num_views - 1))
    return (
        f"Here is the original image {_PICTURE} and here are some crops to help you see better "
        + crops
    )
