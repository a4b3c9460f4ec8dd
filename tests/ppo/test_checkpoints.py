"""When a checkpoint is due, and what becomes of one that fails.

tests/test_survival.py has the rest, on the command line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import make_trainer


def test_a_checkpoint_of_this_iteration_is_not_written_again(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    files = [*trainer.save_checkpoint().iterdir()]
    before = [path.stat().st_mtime_ns for path in files]
    trainer.checkpoints.finish()
    assert [path.stat().st_mtime_ns for path in files] == before


def test_a_checkpoint_of_a_reward_that_was_edited_is_refused(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    for text, refused in (("1.0", False), ("2.0", True)):
        reward.write_text(f"def f(prompts, completions): return [{text}] * len(prompts)\n")
        trainer = make_trainer(tmp_path, rewards=[f"{reward}:f"], model=str(tmp_path))
        if refused:
            with pytest.raises(ValueError, match="another run: the content of rewards/f was"):
                trainer.checkpoints.resume()
        else:
            trainer.save_checkpoint()


def test_a_resume_where_there_is_no_checkpoint_is_a_start(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert not trainer.checkpoints.resume()
    assert trainer.state.iteration == 0
