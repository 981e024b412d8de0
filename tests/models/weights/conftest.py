"""gptqmodel imports torchvision, whose wheels on the package index are for CUDA."""

from importlib.util import find_spec

import torch

# Without CUDA its compiled operations cannot be loaded, and its import fails where it registers
# these two, which nothing here calls.
if find_spec("torchvision") is not None and torch.version.cuda is None:
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
