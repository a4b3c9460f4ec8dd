"""The studies of docs/studies.md and the curves of docs/recipes.md, one file each.

    python -m benchmarks.studies.critic runs/critic
    python -m benchmarks.studies.race runs/race fastppo
    python -m benchmarks.studies.recipe_curves runs

Each study trains on CPUs, prints its table in Markdown, and draws its figure into the directory.
Finished runs are kept and not repeated. `--quick` runs a version that takes minutes.
"""
