"""Primitives that are one ATen call each: complex numbers, transforms, linear algebra, special functions, collectives.

A row: name, operator, kind, attributes, metadata rule, meaning.

Invariant: as in `prims/library/call.py`.
"""

from __future__ import annotations

from torchlazy.prims.attrs import NoAttrs
from torchlazy.prims.library import linalg_meta as ll
from torchlazy.prims.library import math_attrs as la
from torchlazy.prims.library import meta as lm
from torchlazy.prims.library.call import call_of
from torchlazy.prims.prim import Kind, Prim

_LINALG, _SPECIAL, _GROUP = Kind.LINALG, Kind.POINTWISE, Kind.COLLECTIVE

# --- complex numbers and Fourier transforms ---
complex = call_of("complex", "complex", Kind.VIEW, NoAttrs, ll.complex_of, "real + i * imaginary.")
view_as_real = call_of(
    "view_as_real",
    "view_as_real",
    Kind.VIEW,
    NoAttrs,
    ll.view_as_real,
    "Real and imaginary part side by side.",
)
view_as_complex = call_of(
    "view_as_complex",
    "view_as_complex",
    Kind.VIEW,
    NoAttrs,
    ll.view_as_complex,
    "Pairs as complex numbers.",
)
fft_c2c = call_of(
    "fft_c2c",
    "_fft_c2c",
    _LINALG,
    la.FftC2cAttrs,
    ll.fft_c2c,
    "Discrete Fourier transform of complex numbers.",
)
fft_r2c = call_of(
    "fft_r2c",
    "_fft_r2c",
    _LINALG,
    la.FftR2cAttrs,
    ll.fft_r2c,
    "Discrete Fourier transform of real numbers.",
)
fft_c2r = call_of(
    "fft_c2r",
    "_fft_c2r",
    _LINALG,
    la.FftC2rAttrs,
    ll.fft_c2r,
    "Discrete Fourier transform with a real result.",
)

# --- linear algebra ---
cholesky = call_of("cholesky", "linalg_cholesky_ex", _LINALG, la.CholeskyAttrs, ll.cholesky_ex, "A = L L^H.")
cholesky_inverse = call_of(
    "cholesky_inverse",
    "cholesky_inverse",
    _LINALG,
    la.UpperAttrs,
    ll.square_column_major,
    "(L L^H)^-1.",
)
cholesky_solve = call_of(
    "cholesky_solve",
    "_cholesky_solve_helper",
    _LINALG,
    la.UpperAttrs,
    ll.cholesky_solve,
    "X with L L^H X = B.",
)
inverse = call_of("inverse", "linalg_inv_ex", _LINALG, la.CheckErrorsAttrs, ll.inverse_ex, "A^-1.")
eig = call_of("eig", "linalg_eig", _LINALG, NoAttrs, ll.eig, "Eigenvalues and eigenvectors.")
eigvals = call_of("eigvals", "_linalg_eigvals", _LINALG, NoAttrs, ll.eigvals, "Eigenvalues.")
eigh = call_of(
    "eigh",
    "_linalg_eigh",
    _LINALG,
    la.EighAttrs,
    ll.eigh,
    "Eigenvalues and eigenvectors of a Hermitian matrix.",
)
svd = call_of("svd", "_linalg_svd", _LINALG, la.SvdAttrs, ll.svd, "A = U S V^H.")
qr = call_of("qr", "linalg_qr", _LINALG, la.QrAttrs, ll.qr, "A = Q R.")
geqrf = call_of("geqrf", "geqrf", _LINALG, NoAttrs, ll.geqrf, "A = Q R, with Q as Householder reflectors.")
ormqr = call_of("ormqr", "ormqr", _LINALG, la.OrmqrAttrs, ll.ormqr, "Q C or C Q, with Q as Householder reflectors.")
householder_product = call_of(
    "householder_product",
    "linalg_householder_product",
    _LINALG,
    NoAttrs,
    ll.householder_product,
    "Q from Householder reflectors.",
)
lu = call_of("lu", "linalg_lu", _LINALG, la.PivotAttrs, ll.lu, "A = P L U.")
lu_factor = call_of(
    "lu_factor",
    "linalg_lu_factor_ex",
    _LINALG,
    la.PivotCheckAttrs,
    ll.lu_factor_ex,
    "A = P L U in one matrix, P as exchanges.",
)
lu_unpack = call_of(
    "lu_unpack",
    "lu_unpack",
    _LINALG,
    la.LuUnpackAttrs,
    ll.lu_unpack,
    "P, L and U of lu_factor's result.",
)
lu_solve = call_of(
    "lu_solve", "linalg_lu_solve", _LINALG, la.LuSolveAttrs, ll.lu_solve, "X with A X = B, A as factors."
)
solve = call_of("solve", "_linalg_solve_ex", _LINALG, la.SolveAttrs, ll.solve_ex, "X with A X = B.")
solve_triangular = call_of(
    "solve_triangular",
    "linalg_solve_triangular",
    _LINALG,
    la.SolveTriangularAttrs,
    ll.solve_triangular,
    "X with A X = B, A triangular.",
)
ldl_factor = call_of(
    "ldl_factor",
    "linalg_ldl_factor_ex",
    _LINALG,
    la.HermitianCheckAttrs,
    ll.ldl_factor_ex,
    "A = L D L^H.",
)
ldl_solve = call_of(
    "ldl_solve",
    "linalg_ldl_solve",
    _LINALG,
    la.HermitianAttrs,
    ll.ldl_solve,
    "X with A X = B, A as L D L^H.",
)
det = call_of("det", "_linalg_det", _LINALG, NoAttrs, ll.det, "Determinant, and the factors that gradients need.")
slogdet = call_of(
    "slogdet",
    "_linalg_slogdet",
    _LINALG,
    NoAttrs,
    ll.slogdet,
    "Sign and logarithm of the determinant, and the factors that gradients need.",
)
matrix_exp = call_of("matrix_exp", "linalg_matrix_exp", _LINALG, NoAttrs, ll.square_row_major, "e^A.")


# --- special functions ---
def _special(name: str, operator: str, what: str) -> Prim:
    return call_of(name, operator, _SPECIAL, NoAttrs, lm.floats, what)


digamma = _special("digamma", "digamma", "Derivative of lgamma.")
polygamma = call_of("polygamma", "polygamma", _SPECIAL, la.PolygammaAttrs, lm.floats, "n-th derivative of digamma.")
zeta = _special("zeta", "special_zeta", "Hurwitz zeta function.")
igamma = _special("igamma", "igamma", "Regularized lower incomplete gamma function.")
igammac = _special("igammac", "igammac", "Regularized upper incomplete gamma function.")
i0 = _special("i0", "i0", "Modified Bessel function, first kind, order 0.")
i0e = _special("i0e", "special_i0e", "e^-|x| i0(x).")
i1 = _special("i1", "special_i1", "Modified Bessel function, first kind, order 1.")
i1e = _special("i1e", "special_i1e", "e^-|x| i1(x).")
bessel_j0 = _special("bessel_j0", "special_bessel_j0", "Bessel function, first kind, order 0.")
bessel_j1 = _special("bessel_j1", "special_bessel_j1", "Bessel function, first kind, order 1.")
bessel_y0 = _special("bessel_y0", "special_bessel_y0", "Bessel function, second kind, order 0.")
bessel_y1 = _special("bessel_y1", "special_bessel_y1", "Bessel function, second kind, order 1.")
modified_bessel_i0 = _special(
    "modified_bessel_i0",
    "special_modified_bessel_i0",
    "Modified Bessel function, first kind, order 0.",
)
modified_bessel_i1 = _special(
    "modified_bessel_i1",
    "special_modified_bessel_i1",
    "Modified Bessel function, first kind, order 1.",
)
modified_bessel_k0 = _special(
    "modified_bessel_k0",
    "special_modified_bessel_k0",
    "Modified Bessel function, second kind, order 0.",
)
modified_bessel_k1 = _special(
    "modified_bessel_k1",
    "special_modified_bessel_k1",
    "Modified Bessel function, second kind, order 1.",
)
scaled_modified_bessel_k0 = _special(
    "scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k0",
    "e^x modified_bessel_k0(x).",
)
scaled_modified_bessel_k1 = _special(
    "scaled_modified_bessel_k1",
    "special_scaled_modified_bessel_k1",
    "e^x modified_bessel_k1(x).",
)
spherical_bessel_j0 = _special("spherical_bessel_j0", "special_spherical_bessel_j0", "sin(x) / x.")
airy_ai = _special("airy_ai", "special_airy_ai", "Airy function Ai.")
ndtri = _special("ndtri", "special_ndtri", "Quantile of the normal distribution.")
log_ndtr = _special("log_ndtr", "special_log_ndtr", "Logarithm of the normal distribution function.")
erfcx = _special("erfcx", "special_erfcx", "e^(x^2) erfc(x).")
chebyshev_t = _special(
    "chebyshev_t",
    "special_chebyshev_polynomial_t",
    "Chebyshev polynomial, first kind, of degree n.",
)
chebyshev_u = _special(
    "chebyshev_u",
    "special_chebyshev_polynomial_u",
    "Chebyshev polynomial, second kind, of degree n.",
)
chebyshev_v = _special(
    "chebyshev_v",
    "special_chebyshev_polynomial_v",
    "Chebyshev polynomial, third kind, of degree n.",
)
chebyshev_w = _special(
    "chebyshev_w",
    "special_chebyshev_polynomial_w",
    "Chebyshev polynomial, fourth kind, of degree n.",
)
shifted_chebyshev_t = _special("shifted_chebyshev_t", "special_shifted_chebyshev_polynomial_t", "chebyshev_t(2 x - 1).")
shifted_chebyshev_u = _special("shifted_chebyshev_u", "special_shifted_chebyshev_polynomial_u", "chebyshev_u(2 x - 1).")
shifted_chebyshev_v = _special("shifted_chebyshev_v", "special_shifted_chebyshev_polynomial_v", "chebyshev_v(2 x - 1).")
shifted_chebyshev_w = _special("shifted_chebyshev_w", "special_shifted_chebyshev_polynomial_w", "chebyshev_w(2 x - 1).")
hermite_h = _special("hermite_h", "special_hermite_polynomial_h", "Physicists' Hermite polynomial of degree n.")
hermite_he = _special("hermite_he", "special_hermite_polynomial_he", "Probabilists' Hermite polynomial of degree n.")
laguerre_l = _special("laguerre_l", "special_laguerre_polynomial_l", "Laguerre polynomial of degree n.")
legendre_p = _special("legendre_p", "special_legendre_polynomial_p", "Legendre polynomial of degree n.")
gcd = call_of("gcd", "gcd", _SPECIAL, NoAttrs, lm.integers, "Greatest common divisor.")
lcm = call_of("lcm", "lcm", _SPECIAL, NoAttrs, lm.integers, "Least common multiple.")
frexp = call_of("frexp", "frexp.Tensor", _SPECIAL, NoAttrs, lm.frexp, "Mantissa in [0.5, 1) and exponent.")

# --- collectives ---
all_reduce = call_of(
    "all_reduce",
    "_c10d_functional::all_reduce",
    _GROUP,
    la.AllReduceAttrs,
    ll.collective,
    "Operands of all processes, reduced.",
)
all_gather = call_of(
    "all_gather",
    "_c10d_functional::all_gather_into_tensor",
    _GROUP,
    la.AllGatherAttrs,
    ll.all_gather,
    "Operands of all processes, joined.",
)
reduce_scatter = call_of(
    "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor",
    _GROUP,
    la.ReduceScatterAttrs,
    ll.reduce_scatter,
    "This process's part of the reduced operands.",
)
all_to_all = call_of(
    "all_to_all",
    "_c10d_functional::all_to_all_single",
    _GROUP,
    la.AllToAllAttrs,
    ll.all_to_all,
    "Rows exchanged between all processes.",
)
broadcast = call_of(
    "broadcast",
    "_c10d_functional::broadcast",
    _GROUP,
    la.BroadcastAttrs,
    ll.collective,
    "One process's operand.",
)
wait_tensor = call_of(
    "wait_tensor",
    "_c10d_functional::wait_tensor",
    _GROUP,
    NoAttrs,
    ll.collective,
    "The operand, once its collective is done.",
)
