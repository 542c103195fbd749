"""Device functions that generated Triton kernels may call. The generator reads this file as text.

Invariant: every function stands alone or calls only functions of this file, `tl` and `libdevice`, so the source of
those that a kernel names can be pasted before it: the kernel then needs nothing but Triton, and its hash covers them.
Everything here exists in Triton 3.4 and later and runs both on the device and under TRITON_INTERPRET=1.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# --- arithmetic -----------------------------------------------------------------------------------------------------


@triton.jit
def sign_of(x):
    """1, 0 or -1 in the dtype of x; 0 for NaN, as the difference of two comparisons."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def float_signbit(x, bits: tl.constexpr):
    """Whether the sign bit is set (also of -0.0 and NaN)."""
    return x.to(bits, bitcast=True) < 0


@triton.jit
def int_floor_div(a, b):
    """Python's a // b of signed ints: Triton truncates, so step down where the signs differ and it is not exact."""
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def int_remainder(a, b):
    """Python's a % b of signed ints: the sign of the divisor."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def float_remainder(a, b):
    """a - b * floor(a / b), exact because fmod is; the sign of the divisor."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def float_floor_div(a, b):
    """Python's a // b of floats: the exact remainder is taken off first, then the quotient is snapped to an integer."""
    quotient = tl.div_rn(a, b) if a.dtype == tl.float32 else a / b
    rest = libdevice.fmod(a, b)
    whole = tl.div_rn(a - rest, b) if a.dtype == tl.float32 else (a - rest) / b
    whole = tl.where((rest != 0) & ((rest < 0) != (b < 0)), whole - 1, whole)
    snapped = tl.floor(whole)
    snapped = tl.where(whole - snapped > 0.5, snapped + 1, snapped)
    snapped = tl.where(whole != 0, snapped, libdevice.copysign(whole * 0, quotient))
    return tl.where(b == 0, quotient, snapped)


@triton.jit
def uint_pow(base, exponent):
    """base ** exponent by squaring, wrapping, of an exponent that is not negative."""
    result = base * 0 + 1
    for _ in range(base.dtype.primitive_bitwidth):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def int_pow(base, exponent):
    """base ** exponent, wrapping; 0 for a negative exponent unless the base is 1 or -1."""
    result = uint_pow(base, tl.where(exponent < 0, exponent * 0, exponent))
    inverse = tl.where(base == 1, base, tl.where(base == -1, tl.where((exponent & 1) != 0, base, -base), base * 0))
    return tl.where(exponent < 0, inverse, result)


@triton.jit
def shift_left_checked(a, b, bits: tl.constexpr):
    """a << b; 0 where b is negative or not less than the width."""
    legal = (b >= 0) & (b < bits)
    return tl.where(legal, a << tl.where(legal, b, b * 0), a * 0)


@triton.jit
def shift_right_checked(a, b, most: tl.constexpr):
    """a >> b, arithmetic for signed ints; a shift that is negative or too large shifts by `most`."""
    legal = (b >= 0) & (b <= most)
    return a >> tl.where(legal, b, b * 0 + most)


# --- reductions -----------------------------------------------------------------------------------------------------


@triton.jit
def max_with_nan(a, b):
    """The greater one; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def min_with_nan(a, b):
    """The lesser one; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def multiply(a, b):
    """a * b, to fold with."""
    return a * b


@triton.jit
def argmax_pair(value1, index1, value2, index2):
    """The (value, index) that comes first in the order: NaN, then greater values, then lower indices."""
    nan1 = value1 != value1
    nan2 = value2 != value2
    better = (value1 > value2) | (nan1 & (value2 == value2))
    take1 = better | (((value1 == value2) | (nan1 & nan2)) & (index1 < index2))
    return tl.where(take1, value1, value2), tl.where(take1, index1, index2)


@triton.jit
def argmin_pair(value1, index1, value2, index2):
    """The (value, index) that comes first in the order: NaN, then lesser values, then lower indices."""
    nan1 = value1 != value1
    nan2 = value2 != value2
    better = (value1 < value2) | (nan1 & (value2 == value2))
    take1 = better | (((value1 == value2) | (nan1 & nan2)) & (index1 < index2))
    return tl.where(take1, value1, value2), tl.where(take1, index1, index2)


# --- random ---------------------------------------------------------------------------------------------------------


@triton.jit
def philox_word0(seed, stream, counter):
    """Word 0 of Philox4x32-10 as int32: key = the halves of `seed`, counter = (halves of `counter`, stream, 0)."""
    low = seed * 0 + 0xFFFFFFFF
    key0 = (seed & low).to(tl.uint32)
    key1 = ((seed >> 32) & low).to(tl.uint32)
    c0 = (counter & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = stream.to(tl.uint32, bitcast=True) + c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0.to(tl.int32, bitcast=True)
