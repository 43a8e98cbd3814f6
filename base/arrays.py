"""Names of the array types that every room uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Int8s = NDArray[np.int8]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
