"""What every room stands on: errors, strict documents, add-ons, whole files, and how numeric code is compiled.

May import: nothing.
"""

import os

# Numba also reads `.numba_config.yaml` of the working directory, which may be a stranger's; the environment wins.
# These two would load a class that the file names, and run the kernel as Python.
for _name, _usual in (("NUMBA_CACHE_LOCATOR_CLASSES", ""), ("NUMBA_DISABLE_JIT", "0")):
    os.environ.setdefault(_name, _usual)
