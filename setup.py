"""Packages: `fastppo`, and `fastppo_kernels` in the plain folder `kernels/`.

`kernels/` must not be a package: Hugging Face publishes one of that name, and transformers imports
it.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fastppo", "fastppo.*"]),
        *find_packages("kernels", include=["fastppo_kernels", "fastppo_kernels.*"]),
    ],
    package_dir={"fastppo_kernels": "kernels/fastppo_kernels"},
)
