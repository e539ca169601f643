"""Marks for tests that need a GPU."""

import pytest
import torch

from penstock.engines.embedded import fused

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # torch's compiler its own warns doings: as errors, they would keep it from compiling
    pytest.mark.skipif(not torch.cuda.is_available() or fused.kernels is None, reason="no GPU here, or no Triton"),
]
