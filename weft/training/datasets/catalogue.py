"""Every data set by name, and whether it is on this machine."""

import importlib.util
from collections.abc import Callable, Mapping

from weft.errors import RecipeError, nearest
from weft.training.datasets.arrays import arrays
from weft.training.datasets.cifar import cifar10, cifar10_files, cifar100, cifar100_files
from weft.training.datasets.dataset import Splits
from weft.training.datasets.digits import digits
from weft.training.datasets.gratings import gratings
from weft.training.datasets.heat import heat
from weft.training.datasets.images import PILLOW_CURE, images
from weft.training.datasets.mnist import fashion_mnist, fashion_mnist_files, mnist, mnist_files
from weft.training.datasets.places import Availability, FileSet
from weft.training.datasets.sequences import pydoc_topics
from weft.training.datasets.text import pydoc, text

__all__ = ["DATASETS", "locate"]

DATASETS: Mapping[str, Callable[..., Splits]] = {
    "arrays": arrays,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "gratings": gratings,
    "heat": heat,
    "images": images,
    "mnist": mnist,
    "pydoc": pydoc,
    "pydoc_topics": pydoc_topics,
    "text": text,
}

FILE_SETS: Mapping[str, Callable[[], FileSet]] = {
    "cifar10": cifar10_files,
    "cifar100": cifar100_files,
    "fashion_mnist": fashion_mnist_files,
    "mnist": mnist_files,
}

ALWAYS_HERE = {
    "arrays": "any .npz file (option: path)",
    "digits": "scikit-learn",
    "gratings": "made on the fly",
    "heat": "made on the fly",
    "images": "any folder of images (option: path)",
    "pydoc": "this Python's own documentation",
    "pydoc_topics": "this Python's own documentation",
    "text": "any UTF-8 text file (option: path)",
}


def locate(name: str) -> Availability:
    """Where a data set is, or how to get it, without loading it."""
    if name not in DATASETS:
        raise RecipeError(f"unknown dataset ({name}); {nearest(name, DATASETS)}")
    if name in FILE_SETS:
        return FILE_SETS[name]().availability()
    if name == "images" and importlib.util.find_spec("PIL") is None:
        return Availability(name, False, "Pillow is not installed", PILLOW_CURE)
    return Availability(name, True, ALWAYS_HERE[name])
