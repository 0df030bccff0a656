"""Which training images are trained on, and which are held out."""

import numpy as np
import torch
from torch import Tensor

N_IMAGES = 50_000
N_VALIDATION = 2_000
SEED = 2018


def held_out() -> tuple[Tensor, Tensor]:
    """Return the indices of the 48,000 images to train on and of the 2,000 to validate on, each sorted.

    One fixed random choice for all seeds. Differs: the paper trains on all 50,000 and keeps none to choose by.
    """
    order = np.random.Generator(np.random.Philox(key=SEED)).permutation(N_IMAGES)
    validation, train = np.sort(order[:N_VALIDATION]), np.sort(order[N_VALIDATION:])
    return torch.from_numpy(train), torch.from_numpy(validation)
