"""Find out which PPO a package computes: fixtures with one question each, and adapters.

`fixtures.json` has the questions, options and sources, and `fixtures.safetensors` the inputs and
answers. `generate.py` writes both from `formulas.py`. `pytest benchmarks/conformance` asks every
installed package; docs/conformance.md shows the answers.
"""
