"""The packages that Weft needs, and the extras that it can use; none of the extras is imported."""

import re
import shutil
import subprocess
from importlib import metadata
from importlib.util import find_spec

from weft.engines.environment.probe import Probe

__all__ = ["EXTRAS", "REQUIRED"]

OLDEST_JAVA = 17  # what PySpark 4 runs on


def look_at_torch() -> str:
    import torch

    wanted, found = _pinned_version("torch"), str(torch.__version__)
    if wanted is not None and found.partition("+")[0] != wanted:
        raise RuntimeError(f"version {found}, but Weft is tested with {wanted}")
    return f"{found}, {torch.backends.cpu.get_cpu_capability()} kernels, {torch.get_num_threads()} threads"


def look_at_package(distribution: str, module: str) -> str:
    if find_spec(module) is None:
        raise ModuleNotFoundError("not installed")
    return metadata.version(distribution)


def look_at_spark() -> str:
    version = look_at_package("pyspark", "pyspark")
    java = java_version()
    if java < OLDEST_JAVA:
        raise RuntimeError(f"{version}, but Java {java} is older than {OLDEST_JAVA}")
    return f"{version}, Java {java}"


def java_version() -> int:
    """The major version of the `java` on the path."""
    if shutil.which("java") is None:
        raise RuntimeError("no java on the path")
    # Java writes its version to the error stream.
    text = subprocess.run(["java", "-version"], capture_output=True, text=True, timeout=10).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    if found is None:
        raise RuntimeError("java does not tell its version")
    return int(found[1])


def _pinned_version(distribution: str) -> str | None:
    """The version that Weft's own metadata asks for with `==`."""
    pins = (requirement.partition("==") for requirement in metadata.requires("weft") or ())
    return next((version for name, sign, version in pins if name == distribution and sign), None)


def _package(section: str, distribution: str, module: str, cure: str, *, required: bool = False) -> Probe:
    return Probe(section, distribution, lambda: look_at_package(distribution, module), cure, required)


REQUIRED = (
    Probe("packages", "torch", look_at_torch, "pip install -c constraints.txt torch", required=True),
    *(
        _package("packages", distribution, module, f"pip install {distribution}", required=True)
        for distribution, module in {
            "numpy": "numpy",
            "scipy": "scipy",
            "scikit-learn": "sklearn",
            "safetensors": "safetensors",
            "rich": "rich",
            "typer": "typer",
        }.items()
    ),
)

EXTRAS = (
    _package("extras", "ray", "ray", "pip install ray"),
    Probe("extras", "pyspark", look_at_spark, "pip install pyspark, and sudo apt-get install default-jre-headless"),
    *(
        _package("extras", distribution, module, f"pip install {distribution}")
        for distribution, module in {
            "jax": "jax",
            "onnx": "onnx",
            "onnxruntime": "onnxruntime",
            "transformers": "transformers",
            "tensorboard": "tensorboard",
            "plotly": "plotly",
            "pillow": "PIL",
        }.items()
    ),
)
