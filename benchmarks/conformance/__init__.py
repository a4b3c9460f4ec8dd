"""Which PPO is it? Small fixtures with one question each, and adapters that let packages answer.

`fixtures.json` has the questions, options and sources, `fixtures.safetensors` the inputs and
answers. `generate.py` writes both from `formulas.py`. `pytest benchmarks/conformance` asks every
installed package: docs/conformance.md.
"""
