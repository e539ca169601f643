"""Arrays of the host as tensors on a GPU."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies through pinned memory: from other memory the copy would wait until the GPU has done all that it was given before."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
