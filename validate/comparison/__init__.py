"""Two sides beside each other: a recording and its replay, or any two of them."""
