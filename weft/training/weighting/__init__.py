"""How much a rank's samples count, for those who must know it before backward.

Apart from the training, so that models can ask for it.
"""

from weft.training.weighting.weighting import Weighting, use_weight_of_loss, weight_of_loss

__all__ = ["Weighting", "use_weight_of_loss", "weight_of_loss"]
