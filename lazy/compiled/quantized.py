"""`torchlazy.compile(model, quantize="int8-dynamic")`: linear layers in int8 on the CPU, for inference.

A layer's weight is kept in int8 with one scale for each row; its input is quantized as it comes, with one scale for
the whole tensor: y = (round(x / s) @ W8.T) * s * w + b, with s = max|x| / 127 and w = max|W| / 127 by rows (/ 63
on CPUs without VNNI). The product is oneDNN's (`onednn::qlinear_pointwise`), from weights that are packed once; what
quantizes the input is a part of our programs.

Invariant: the caller's model is not changed: its layers' copies share their parameters and hooks. Before each call the
weights that were written to or replaced since are quantized again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torchlazy.lazy.compiled.callable import CompiledCallable
from torchlazy.lazy.compiled.front_door import CompileSettings
from torchlazy.lazy.compiled.module import compiled_module, original_of
from torchlazy.lazy.ops.int8_linear import pack, weight_limit

LEAST = 1 << 19  # elements of a weight: of fewer a few rows take longer in int8 (30 us at least) than in float32
_MOST = 127.0
_TINY = 1e-12  # a scale at least: of a row, or an input, of zeros
_DTYPES = (torch.float32, torch.bfloat16)


class Int8Linear(torch.nn.Linear):
    """A copy of a linear layer, or of a `Conv1D` of transformers, that shares its parameters and computes in int8.

    Input and result are as the layer's: (..., in_features) -> (..., out_features), float32 or bfloat16.
    """

    int8: torch.Tensor  # (out_features, in_features)
    scales: torch.Tensor  # (out_features,), float32
    seen: Any  # the weight that was quantized, its version and its address
    is_turned: bool  # whether the weight is (in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RuntimeError where the result would need a gradient."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                'torchlazy.compile(quantize="int8-dynamic") is for inference: an input of a linear layer needs a '
                "gradient, which int8 does not give / call the model under torch.no_grad()"
            )
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if dtype not in _DTYPES or not x.numel():
            return self.floating(x)
        scale = (x.abs().amax().float() / _MOST).clamp(min=_TINY)
        rounded = (x / scale).round().clamp(-_MOST, _MOST).to(torch.int8)
        bias = None if self.bias is None else self.bias.float()
        return torch.ops.torchlazy.int8_linear(rounded, scale, self.int8, self.scales, bias, dtype)  # type: ignore[no-any-return]

    def floating(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer itself computes."""
        return torch.nn.functional.linear(x, self._rows(), self.bias)

    def _rows(self) -> torch.Tensor:
        """The weight as a linear layer has it: (out_features, in_features)."""
        return self.weight.t() if self.is_turned else self.weight

    def refresh(self) -> None:
        """Quantize the weight, where it was written to or replaced since."""
        weight = self._parameters["weight"]
        assert weight is not None
        now = weight, weight._version, weight.data_ptr()
        if self.seen is not None and self.seen[0] is weight and self.seen[1:] == now[1:]:
            return
        with torch.no_grad():
            rows = self._rows().detach().float()
            most = weight_limit()
            scales = (rows.abs().amax(1) / most).clamp(min=_TINY)
            self.int8.copy_((rows / scales[:, None]).round().clamp(-most, most))
            self.scales.copy_(scales)
        pack(self.int8)
        self.seen = now


def _int8(layer: torch.nn.Module) -> Int8Linear | None:
    """The layer's copy in int8; None where it stays as it is."""
    kind = type(layer)
    is_turned = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    weight = layer._parameters.get("weight")
    if not (kind is torch.nn.Linear or is_turned) or weight is None or layer._parameters.keys() - {"weight", "bias"}:
        return None
    if weight.numel() < LEAST or weight.dtype not in _DTYPES:
        return None
    if weight.device.type != "cpu":
        raise ValueError(
            f"torchlazy.compile: quantize finds a weight on {weight.device}; products in int8 are oneDNN's, on the CPU "
            "/ move the model with .cpu()"
        )
    made = Int8Linear.__new__(Int8Linear)
    made.__dict__.update(layer.__dict__)
    shape = (weight.shape[1], weight.shape[0]) if is_turned else (weight.shape[0], weight.shape[1])
    made.is_turned, made.seen = is_turned, None
    made.out_features, made.in_features = shape
    made.int8 = torch.empty(shape, dtype=torch.int8)
    made.scales = torch.empty(shape[0])
    return made


def _copied(module: torch.nn.Module, known: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """The module, or a copy that shares its attributes, with copies of the modules within that are quantized."""
    found = known.get(id(module))
    if found is None:
        found = _int8(module)
        if found is None:
            inner = {name: part and _copied(part, known) for name, part in module._modules.items()}
            found = module
            if any(inner[name] is not part for name, part in module._modules.items()):
                found = copy.copy(module)
                found.__dict__["_modules"] = inner
        known[id(module)] = found
    return found


class QuantizedCallable(CompiledCallable):
    """The compiled callable of a module with layers in int8."""

    def __init__(self, function: Any, settings: CompileSettings) -> None:
        super().__init__(function, settings)
        self._layers = [layer for layer in function.modules() if type(layer) is Int8Linear]
        others = sum(type(layer) is torch.nn.Linear for layer in function.modules())
        self._note(f"{len(self._layers)} linear layers in int8, {others} as they are")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self._layers:
            layer.refresh()
        return super().__call__(*args, **kwargs)


def compile_quantized(model: Any, settings: CompileSettings) -> Any:
    """What `torchlazy.compile(model, quantize=...)` returns. Raises TypeError for what is no module."""
    model = original_of(model)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"torchlazy.compile: quantize is for modules, whose layers it copies, not for a {type(model).__name__}; "
            "compile the module that it calls"
        )
    found = _copied(model, {})
    if found is model:
        raise ValueError(
            f"torchlazy.compile: quantize finds no linear layer of at least {LEAST} weights in float32 or bfloat16; "
            "smaller ones are faster as they are / leave quantize out"
        )
    return compiled_module(found, QuantizedCallable(found, settings))


__all__ = ["Int8Linear", "compile_quantized"]
