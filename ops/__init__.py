# ruff: noqa: F403
"""The ops, one family a file; importing a family fills the registry, and neither compiles nor imports Numba.

Some functions have the name of their file (`scale`, `norm`): `ops.norm` is the function, `from ggjit.ops.norm import`
reaches the file.
"""

import sys

from ggjit.arguments import checked
from ggjit.ops.attention import *
from ggjit.ops.back import *
from ggjit.ops.binary import *
from ggjit.ops.conv import *
from ggjit.ops.conv_by_im2col import *
from ggjit.ops.conv_transpose import *
from ggjit.ops.copy import *
from ggjit.ops.custom import *
from ggjit.ops.dsv4 import *
from ggjit.ops.fill import *
from ggjit.ops.glu import *
from ggjit.ops.group_norm import *
from ggjit.ops.im2col import *
from ggjit.ops.indexer import *
from ggjit.ops.linalg import *
from ggjit.ops.loss import *
from ggjit.ops.math import *
from ggjit.ops.mul_mat import *
from ggjit.ops.mul_mat_id import *
from ggjit.ops.norm import *
from ggjit.ops.optimizer import *
from ggjit.ops.pad import *
from ggjit.ops.pool import *
from ggjit.ops.recurrence_back import *
from ggjit.ops.reduce import *
from ggjit.ops.repeat import *
from ggjit.ops.rope import *
from ggjit.ops.rows import *
from ggjit.ops.rwkv import *
from ggjit.ops.scale import *
from ggjit.ops.set import *
from ggjit.ops.soft_max import *
from ggjit.ops.sort import *
from ggjit.ops.ssm import *
from ggjit.ops.unary import *
from ggjit.ops.unary_back import *
from ggjit.ops.upscale import *
from ggjit.ops.views import *
from ggjit.ops.window import *

_FAMILIES = ("attention", "back", "binary", "conv", "conv_by_im2col", "conv_transpose", "copy", "custom",
             "dsv4", "fill", "glu", "group_norm", "im2col", "indexer", "linalg", "loss", "math", "mul_mat",
             "mul_mat_id", "norm", "optimizer", "pad", "pool", "recurrence_back", "reduce", "repeat", "rope",
             "rows", "rwkv", "scale", "set", "soft_max", "sort", "ssm", "unary", "unary_back", "upscale",
             "views", "window")  # fmt: skip
__all__ = [name for family in _FAMILIES for name in sys.modules[f"{__name__}.{family}"].__all__]
globals().update({name: checked(globals()[name]) for name in __all__})
