"""Tables of the number arguments of operators that may be inputs of programs, by operator name.

Invariant: tables alone. What is made of such a number while a call is captured is in numbers/followed.py.
"""

from __future__ import annotations

BATCH_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
)  # fmt: skip
# The operator's backward does not read them, or autograd passes them on with their expression (a Scalar, not a double).
_ANYWHERE: dict[str, frozenset[str]] = {
    name: frozenset(arguments)
    for names, arguments in (
        (BATCH_NORMS, ("momentum", "exponential_average_factor")),
        (("native_layer_norm", "native_group_norm", "_fused_rms_norm"), ("eps",)),
        (("gt", "ge", "lt", "le", "eq", "ne"), ("other",)),
        (("masked_fill",), ("value",)),
        (("where",), ("self", "other")),
        (("leaky_relu", "leaky_relu_backward"), ("negative_slope",)),
        (("elu", "elu_backward"), ("alpha", "scale", "input_scale")),
        (("threshold", "threshold_backward"), ("threshold", "value")),
        (("hardtanh", "hardtanh_backward"), ("min_val", "max_val")),
        (("softshrink", "hardshrink", "softshrink_backward", "hardshrink_backward"), ("lambd",)),
        (("softplus", "softplus_backward"), ("beta", "threshold")),
        (("linspace",), ("start", "end")),
        (("scalar_tensor",), ("s",)),
        (("_foreach_clamp_min", "_foreach_clamp_max", "_foreach_maximum", "_foreach_minimum"), ("scalar", "scalars")),
    )
    for name in names
}
# The backward reads them otherwise: inputs only where no gradient is wanted.
WITHOUT_GRADIENT: dict[str, frozenset[str]] = {
    name: frozenset(arguments)
    for names, arguments in ((("addmm", "baddbmm", "addmv", "addbmm", "addr"), ("alpha", "beta")),)
    for name in names
}
# The backward is an operator that gets the same number again, as a plain one: forward, argument, backward.
BACKWARD_GETS: dict[str, tuple[str, str]] = {
    "huber_loss": ("delta", "huber_loss_backward"),
    "smooth_l1_loss": ("beta", "smooth_l1_loss_backward"),
    "native_batch_norm": ("eps", "native_batch_norm_backward"),
    "_native_batch_norm_legit": ("eps", "native_batch_norm_backward"),
    "_native_batch_norm_legit_functional": ("eps", "native_batch_norm_backward"),
    "cudnn_batch_norm": ("epsilon", "cudnn_batch_norm_backward"),
    **{
        name: ("scale", f"{name}_backward")
        for name in (
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        )
    },
}  # fmt: skip
BACKWARDS = {backward: argument for argument, backward in BACKWARD_GETS.values()}
# What handlers of the recorder compute from them is in `derived`.
HANDLED: dict[str, frozenset[str]] = {
    "native_dropout": frozenset({"p"}),
    "bernoulli": frozenset({"p"}),
    "normal": frozenset({"mean", "std"}),
    "uniform": frozenset({"to"}),
    **{name: frozenset({argument}) for name, (argument, _) in BACKWARD_GETS.items() if "attention" in name},
}
# The backward of a dropout gets what it multiplies with.
DERIVED_AGAIN = {"native_dropout_backward": ("scale", "native_dropout")}


def names_followed(base: str) -> frozenset[str]:
    """Names of the arguments of operator `base` (its functional name) that may be inputs within a captured call."""
    own = _ANYWHERE.get(base, frozenset()) | WITHOUT_GRADIENT.get(base, frozenset()) | HANDLED.get(base, frozenset())
    if base in BACKWARD_GETS:
        own |= {BACKWARD_GETS[base][0]}
    if base in BACKWARDS:
        own |= {BACKWARDS[base]}
    return own | ({DERIVED_AGAIN[base][0]} if base in DERIVED_AGAIN else frozenset())


__all__ = [
    "BACKWARDS",
    "BACKWARD_GETS",
    "BATCH_NORMS",
    "DERIVED_AGAIN",
    "HANDLED",
    "WITHOUT_GRADIENT",
    "names_followed",
]
