"""A sparsely gated mixture of experts (Shazeer et al., 2017): `MixtureOfExperts` in the place of a feed-forward part.

gating      which experts each token goes to, with which weight, and how evenly they are used
routing     the order in which tokens are computed: by expert, those beyond an expert's capacity left out
feed_forward    the experts themselves, stacked in tensors
layer       all of it as one module
"""

from weft.training.models.experts.feed_forward import Experts
from weft.training.models.experts.layer import MixtureOfExperts, auxiliary_loss, mixtures_of

__all__ = ["Experts", "MixtureOfExperts", "auxiliary_loss", "mixtures_of"]
