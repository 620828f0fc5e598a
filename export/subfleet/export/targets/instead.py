"""Suggests replacements for operators that programs lack, in the terms of a network's author."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ORDER = (
    "use amax or amin for the largest or smallest value, or a softmax or logsumexp for a smooth choice; programs "
    "cannot sort"
)
_ALGEBRA = (
    "compute it once in __init__ if it does not depend on weights, or approximate it by products of matrices, as "
    "Newton-Schulz steps do"
)
_SPECIAL = "use functions made of exp, log, tanh and erf"
_THREE = "use nn.Conv3d with a stride, or pool two of the dimensions after a reshape"
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "cummax", "cummin"), _ORDER),
        **dict.fromkeys(
            ("linalg_svd", "linalg_inv_ex", "linalg_solve_ex", "linalg_det", "linalg_cholesky_ex", "linalg_qr"),
            _ALGEBRA,
        ),
        **dict.fromkeys(("linalg_eigh", "linalg_eig", "linalg_matrix_exp", "linalg_lu", "linalg_slogdet"), _ALGEBRA),
        **dict.fromkeys(("lgamma", "digamma", "erfinv", "i0", "special_i0", "igamma", "polygamma"), _SPECIAL),
        **dict.fromkeys(("atan", "atan2", "asin", "acos"), "use torch.tanh, or a softsign"),
        **dict.fromkeys(("nan_to_num", "isnan", "isinf", "isneginf"), "keep numbers finite where they are made"),
        **dict.fromkeys(("max_pool3d_with_indices", "avg_pool3d", "adaptive_avg_pool3d"), _THREE),
        "logcumsumexp": "use logsumexp over the whole dimension, or cumsum of exponentials",
        "cumprod": "multiply 64 factors at most, or use exp of a cumsum of logarithms",
        "grid_sampler_2d": "use nn.Upsample, or a convolution",
        "grid_sampler_3d": "use nn.Upsample, or a convolution",
        "embedding_renorm": (
            "leave out max_norm, and scale what is read: y * (m / y.norm(dim=-1, keepdim=True).clamp(min=m))"
        ),
        "native_batch_norm_legit_functional": "set track_running_stats=False",
        "index_put": "use scatter_add, or a product with a matrix of ones and zeros",
    }
)
"""By the operator's name, without leading underscores."""


def suggest_alternative(operator: Any) -> str:
    """Return what to do without an operator of PyTorch."""
    name = operator._schema.name.rpartition("::")[2].strip("_")  # noqa: SLF001 - PyTorch tells it nowhere else
    return _INSTEAD.get(name, "compute it by sums, products, comparisons and the functions of nn.functional")
