"""Types of the NumPy arrays that the tables are kept in: indices and ids, costs, masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
