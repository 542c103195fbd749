"""Functions that generated Numba kernels call. The toolchain executes this text; nothing imports it.

Invariant: every function means on scalars what ATen means, for every edge: integers wrap, division of integers by zero
gives 0, NaN wins in maximum and loses in fmax. An address is an int64; loads and stores are intrinsics, because
Numba's parallel pass deletes stores into arrays that it saw being made.
"""

import math

import numpy as np
from llvmlite import ir
from numba import (
    boolean,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    njit,
    prange,  # noqa: F401  (for the kernels)
    types,
    uint8,
    uint16,
    uint32,
    uint64,
)
from numba.extending import intrinsic

inf, nan = math.inf, math.nan
pure = njit(error_model="numpy", nogil=True)
_MEMORY = {
    "bool": boolean, "uint8": uint8, "int8": int8, "int16": int16, "int32": int32, "int64": int64, "uint16": uint16,
    "uint32": uint32, "uint64": uint64, "float32": float32, "float64": float64,
}  # fmt: skip


# ---- memory


def _element(context, builder, signature, arguments, kind):
    pointer = builder.inttoptr(arguments[0], context.get_data_type(kind).as_pointer())
    return builder.gep(pointer, [arguments[1]])


def _make_load(kind):
    def load(typingctx, address, index):
        def codegen(context, builder, signature, arguments):
            pointer = _element(context, builder, signature, arguments, kind)
            return context.unpack_value(builder, kind, pointer)

        return kind(types.int64, types.int64), codegen

    return intrinsic(load)


def _make_store(kind):
    def store(typingctx, address, index, value):
        def codegen(context, builder, signature, arguments):
            pointer = _element(context, builder, signature, arguments, kind)
            context.pack_value(builder, kind, arguments[2], pointer)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), codegen

    return intrinsic(store)


for _name, _kind in _MEMORY.items():
    globals()[f"load_{_name}"] = _make_load(_kind)
    globals()[f"store_{_name}"] = _make_store(_kind)
store_int64 = _make_store(int64)


@intrinsic
def bitcast(typingctx, value, target):
    """The bits of a number as another type of the same size: `bitcast(x, int32)`."""
    result = target.instance_type

    def codegen(context, builder, signature, arguments):
        kind = context.get_value_type(result)
        if isinstance(kind, ir.IntType) and isinstance(arguments[0].type, ir.IntType):
            return arguments[0]
        return builder.bitcast(arguments[0], kind)

    return result(value, target), codegen


# ---- halves: memory holds their bits as uint16


@pure
def bf16_bits(x):
    bits = bitcast(x, uint32)
    if x != x:
        return uint16((bits >> 16) | 64)
    return uint16((bits + uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16)


@pure
def bf16_value(bits):
    return bitcast(uint32(uint32(bits) << 16), float32)


@pure
def half_bits(x):
    bits = bitcast(x, uint32)
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return uint16(sign | 0x7E00)
    if magnitude >= 0x477FF000:  # 65520 and above
        return uint16(sign | 0x7C00)
    if magnitude < 0x38800000:  # below the least normal half: adding 0.5 leaves the rounded bits at the end
        shifted = bitcast(float32(bitcast(uint32(magnitude), float32) + float32(0.5)), uint32)
        return uint16(sign | (shifted - 0x3F000000))
    return uint16(sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13))


@pure
def half_value(bits):
    sign = uint32(bits & 0x8000) << 16
    magnitude = uint32(bits & 0x7FFF)
    if magnitude >= 0x7C00:
        return bitcast(uint32(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13)), float32)
    # Exact for normal and denormal halves: their exponent is moved by a multiplication.
    value = bitcast(uint32(magnitude << 13), float32) * float32(2.0**112)
    return bitcast(uint32(bitcast(value, uint32) | sign), float32)


@pure
def round_to_bf16(x):
    return bf16_value(bf16_bits(x))


@pure
def round_to_half(x):
    return half_value(half_bits(x))


# ---- integers


@pure
def int_floor_div(a, b):
    if b == 0:
        return a * 0
    if b == -1:  # the one quotient that overflows is the least integer's
        return a * -1
    return a // b


@pure
def int_remainder(a, b):
    if b == 0 or b == -1:
        return a * 0
    return a % b


@pure
def int_fmod(a, b):
    rest = int_remainder(a, b)
    return rest - b if rest != 0 and (rest < 0) != (a < 0) else rest


@pure
def int_trunc_div(a, b):
    quotient = int_floor_div(a, b)
    return quotient + 1 if int_remainder(a, b) != 0 and (a < 0) != (b < 0) else quotient


@pure
def uint_floor_div(a, b):
    return a // b if b != 0 else a * 0


@pure
def uint_remainder(a, b):
    return a % b if b != 0 else a * 0


@pure
def int_pow(base, exponent):
    if exponent < 0:
        return int64(1) if base == 1 else int64(1 - 2 * (exponent & 1)) if base == -1 else int64(0)
    result, square = int64(1), int64(base)
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


@pure
def uint_pow(base, exponent):
    result, square = uint64(1), uint64(base)
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent = uint64(exponent) >> uint64(1)
    return result


@pure
def sign_of(x):
    return (x > 0) * 1 - (x < 0) * 1


@pure
def shift_left(a, b, bits):
    return a << b if 0 <= b < bits else a * 0


@pure
def shift_right(a, b, bits):
    return a >> b if 0 <= b < bits else a >> (bits - 1)


# ---- floats


@pure
def float_remainder(a, b):
    rest = np.fmod(a, b)
    return rest + b if rest != 0 and (rest < 0) != (b < 0) else rest


@pure
def float_floor_div(a, b):
    if b == 0:
        return a / b
    rest = np.fmod(a, b)
    quotient = (a - rest) / b
    if rest != 0 and (rest < 0) != (b < 0):
        quotient -= 1
    if quotient == 0:
        return np.copysign(quotient * 0, a / b)
    whole = np.floor(quotient)
    return whole + 1 if quotient - whole > 0.5 else whole


@pure
def maximum(a, b):
    return a if a > b or a != a else b


@pure
def minimum(a, b):
    return a if a < b or a != a else b


@pure
def fmax(a, b):
    return b if a != a else a if b != b or a >= b else b


@pure
def fmin(a, b):
    return b if a != a else a if b != b or a <= b else b


@pure
def erfinv(x):
    """Winitzki's closed form, then Halley's steps on erf, or on erfc where erf is flat."""
    x = float64(x)
    size = abs(x)
    if not size < 1:
        return math.copysign(inf, x) if size == 1 else nan
    if size < 1e-300:
        return x * 0.8862269254527580
    logarithm = math.log1p(-size * size)
    middle = 4.330746750799873 + logarithm / 2
    y = math.sqrt(max(math.sqrt(middle * middle - logarithm / 0.147) - middle, 0.0))
    for _ in range(4):
        miss = math.erf(y) - size if size < 0.5 else (1 - size) - math.erfc(y)
        step = miss / (1.1283791670955126 * math.exp(-y * y))
        y -= step / (1 + y * step)
    return math.copysign(y, x)


@pure
def lgamma(x):
    return inf if (x <= 0 and x == math.floor(x)) or abs(x) == inf else math.lgamma(x)


# ---- others


@pure
def philox_word0(seed, stream, counter):
    """Word 0 of Philox4x32-10 with key `seed` and counter (counter, stream, 0)."""
    low = uint64(0xFFFFFFFF)
    key, count = uint64(seed), uint64(counter)
    k0, k1 = key & low, key >> uint64(32)
    c0, c1, c2, c3 = count & low, count >> uint64(32), uint64(stream) & low, uint64(0)
    for _ in range(10):
        p0, p1 = c0 * uint64(0xD2511F53), c2 * uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> uint64(32)) ^ c1 ^ k0, p1 & low, (p0 >> uint64(32)) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + uint64(0x9E3779B9)) & low, (k1 + uint64(0xBB67AE85)) & low
    return bitcast(uint32(c0), int32)


@pure
def wrap_index(value, size, error, position):
    """A valid index for `value`; out of range it is 0 and the place is reported."""
    index = int64(value)
    if index < 0:
        index += size
    if index < 0 or index >= size:
        store_int64(error, 0, position)
        return int64(0)
    return index


@pure
def beats_max(x, best):
    return (x != x and best == best) or x > best


@pure
def beats_min(x, best):
    return (x != x and best == best) or x < best
