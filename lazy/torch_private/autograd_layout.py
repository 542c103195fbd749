"""Offsets of autograd's data in a tensor's C++ objects, found by trying; and its version counters.

Invariant: an offset is returned only where the word or byte there agreed with torch's public attributes each time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

_WORDS = 16  # that are searched, fewer than an implementation has


def places_of_gradients() -> tuple[int, int, int] | None:
    """Offsets in bytes: in a tensor's implementation, of the pointer to its autograd metadata; in these, of the pointer
    to its gradient's implementation, and of the byte that is 1 where it requires one. None where they are not found.

    Why private: guards test hundreds of parameters at each call, and each call of torch's functions waits for the
    memory reads of the one before it; words at known offsets are read in parallel.
    """
    try:
        size_of: Any = ctypes.CDLL(None).malloc_usable_size
    except (AttributeError, OSError, TypeError):
        return None
    size_of.restype, size_of.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    tensors = [torch.zeros(2, device="cpu"), torch.zeros(3, device="cpu")]
    before = [_words(tensor._cdata, _WORDS) for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_()
    after = [_words(tensor._cdata, _WORDS) for tensor in tensors]
    places = [i for i in range(_WORDS) if all(not a[i] and b[i] > 1 << 20 for a, b in zip(before, after, strict=True))]
    if len(places) != 1:
        return None
    kept = [words[places[0]] for words in after]
    sizes = [size_of(address) for address in kept]
    if min(sizes) < 64 or max(sizes) > 4096:  # it is not an allocation of its own
        return None
    gradient = _place_of_gradient(tensors, kept, min(sizes) // 8)
    flag = _place_of_flag(tensors, kept, min(sizes))
    stays = [_words(tensor._cdata, _WORDS)[places[0]] for tensor in tensors] == kept
    return (8 * places[0], 8 * gradient, flag) if gradient is not None and flag is not None and stays else None


def _place_of_gradient(tensors: list[torch.Tensor], kept: list[int], count: int) -> int | None:
    places = set(range(count))
    for _ in range(2):
        for tensor, address in zip(tensors, kept, strict=True):
            tensor.grad = None
            none = _words(address, count)
            tensor.grad = torch.zeros_like(tensor)
            found = _words(address, count)
            places = {i for i in places if found[i] == tensor.grad._cdata != none[i]}
    return places.pop() if len(places) == 1 else None


def _place_of_flag(tensors: list[torch.Tensor], kept: list[int], count: int) -> int | None:
    places = set(range(count))
    for wanted in (True, False, True, True, False, False, True):
        for tensor, address in zip(tensors, kept, strict=True):
            tensor.requires_grad_(wanted)
            found = bytes((ctypes.c_char * count).from_address(address))
            places = {i for i in places if found[i] == wanted}
    return places.pop() if len(places) == 1 else None


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def place_of_graph(places: tuple[int, int, int] | None) -> int:
    """The offset in bytes in autograd metadata of a word that is 0 for tensors without a `grad_fn`; -1 if it is not
    found.

    Why private: as above; tensors that require no gradient often have metadata, too.
    """
    if places is None:
        return -1
    with torch.enable_grad():
        leaves = [torch.zeros(2, device="cpu", requires_grad=True) for _ in range(2)]
        made = [tensor for leaf in leaves for tensor in torch.std_mean(leaf)]
    of_leaves, of_made = ([_words(_kept(tensor, places), _GRAPH_WORDS) for tensor in some] for some in (leaves, made))
    found = {
        place
        for place in range(_GRAPH_WORDS)
        if not any(words[place] for words in of_leaves)
        and of_made[0][place] == of_made[1][place] != of_made[2][place] == of_made[3][place]
        and all(words[place] for words in of_made)
    }
    for tensor in made:
        tensor.detach_()
    left = [_words(_kept(tensor, places), _GRAPH_WORDS) for tensor in made if _kept(tensor, places)]
    found = {place for place in found if not any(words[place] for words in left)}
    return 8 * min(found) if found else -1


_GRAPH_WORDS = 8  # that are searched, fewer than the metadata have


def _kept(tensor: torch.Tensor, places: tuple[int, int, int]) -> int:
    return _words(tensor._cdata, _WORDS)[places[0] // 8]


def have_one_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to one of them counts as one to the other. Asked by counting one, which is taken back."""
    before, version = one._version, other._version
    if before != version:
        return False
    set_versions([one], [version + 1])
    found = other._version == version + 1
    set_versions([one], [before])
    return found


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the tensors' version counters, and with them those of all that share their memory in autograd's eyes.

    Why private: writes of a backward that is only recorded are taken back, which counters cannot be told in public.
    """
    if tensors:
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)  # type: ignore[attr-defined,arg-type]
