"""What docs/studies.md and docs/ppo.md report, one file a study:

    python -m benchmarks.studies.critic runs/critic
    python -m benchmarks.studies.race runs/race fastppo

Each trains on CPUs with several seeds, prints its table in Markdown and draws its picture into the
directory. A run that ended there is not run again; `--quick` makes a version of minutes. The pages
name the commit of studies that are in the history alone.
"""
