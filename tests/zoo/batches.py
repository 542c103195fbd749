"""Batches of the transformers zoo, by kind.

Invariant: padding is at the end, as the library's tokenizers put it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tests.zoo.case import Batch
from tests.zoo.entry import VOCABULARY


def _text() -> Batch:
    codes = torch.randint(3, VOCABULARY, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.long)
    labels = codes.clone()
    codes[1, 7:], mask[1, 7:], labels[1, 7:] = 0, 0, -100
    return {"input_ids": codes, "attention_mask": mask, "labels": labels}


def _full_text() -> Batch:
    codes = torch.randint(3, VOCABULARY, (2, 16))
    return {"input_ids": codes, "labels": codes.clone()}


def _translation() -> Batch:
    return {**_text(), "labels": torch.randint(3, VOCABULARY, (2, 6))}


def _image(size: int = 16, count: int = 2) -> Batch:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(0, 5, (count,))}


def _segmented() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 5, (2, 32, 32))}


def _image_text() -> Batch:
    text = _text()
    del text["labels"]
    return {**text, "pixel_values": torch.randn(2, 3, 16, 16)}


def _wave() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 12, (2, 4))}


def _spectrum(frames: int = 20, bins: int = 16, *, features_first: bool = True) -> Batch:
    shape = (2, bins, frames) if features_first else (2, frames, bins)
    return {"input_features": torch.randn(shape), "labels": torch.randint(3, VOCABULARY, (2, 6))}


def _series() -> Batch:
    values = torch.randn(2, 24)
    return {"past_values": values[..., None].repeat(1, 1, 2), "future_values": torch.randn(2, 8, 2)}


def _text_class() -> Batch:
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 16)), "labels": torch.randint(0, 5, (2,))}


def _inputs() -> Batch:
    text = _text()
    return {"inputs": text["input_ids"], "attention_mask": text["attention_mask"], "labels": text["labels"]}


def _masked_image() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "noise": torch.rand(2, 16)}


def _video() -> Batch:
    return {"pixel_values": torch.randn(2, 4, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}


def _image_of_text() -> Batch:
    return {**_text(), "pixel_values": torch.randn(2, 3, 16, 16)}


def _spectrogram() -> Batch:
    return {"input_values": torch.randn(2, 16, 16), "labels": torch.randint(0, 2, (2,))}


def _time_series() -> Batch:
    return {
        "past_values": torch.rand(3, 10), "past_time_features": torch.rand(3, 10, 1),
        "past_observed_mask": torch.ones(3, 10), "future_values": torch.rand(3, 4),
        "future_time_features": torch.rand(3, 4, 1),
    }  # fmt: skip


BATCHES: dict[str, Callable[[], Batch]] = {
    "text": _text,
    "full text": _full_text,
    "translation": _translation,
    "image": _image,
    "large image": functools.partial(_image, 32),
    "images": functools.partial(_image, 64, 4),
    "segmented": _segmented,
    "image and text": _image_text,
    "wave": _wave,
    "spectrum": _spectrum,
    "rows": functools.partial(_spectrum, features_first=False),
    "series": _series,
    "long text class": _text_class,
    "inputs": _inputs,
    "masked image": _masked_image,
    "video": _video,
    "image of text": _image_of_text,
    "spectrogram": _spectrogram,
    "time series": _time_series,
}
