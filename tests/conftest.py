# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests. It is set before the libraries that read it are imported."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need a network, and looking for one costs 20 s a try
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # OpenMP threads that spin starve the other processes of a small machine
