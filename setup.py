"""Where the packages are: `fastppo` here, `fastppo_kernels` inside the plain folder `kernels/`.

`kernels/` itself is no package: Hugging Face publishes one of that name, and transformers imports
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
