"""Every task on two processes gives the curve of one, step by step, and counts what it leaves out like one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spanwise.report.terminal import show
from spanwise.train.run_folder import checkpoints, verify_checkpoint
from tests.train import runs
from tests.train.small_tasks import alone, dealt, distill, masked, streamed, vision
from tests.train.two_ranks import on_two_ranks


def epochs(counted: list[float]) -> list[list[float]]:
    """What the micro-batches of a rank counted, by epoch: two in the first step, what is left in the second."""
    half = len(counted) // 2
    return [counted[:half], counted[half:]]


def test_two_processes_give_the_curve_of_one_in_every_task(tmp_path: Path) -> None:
    """The last run gets SIGTERM on one rank alone: both save the same step and end."""
    teacher = runs.save_teacher(tmp_path / "teacher")
    tasks = [distill(tmp_path, teacher, False), distill(tmp_path, teacher, True), vision(tmp_path), masked(tmp_path)]
    drawn = masked(tmp_path) | {"loss": {"t_sampling": "iid"}}
    tasks += [streamed(distill(tmp_path, teacher, False), tmp_path), streamed(drawn, tmp_path)]
    wanted = [alone(content, tmp_path / f"alone-{place}") for place, content in enumerate(tasks)]
    contents = [dealt(content, tmp_path / f"dealt-{place}") for place, content in enumerate(tasks)]
    contents.append(contents[0] | {"output": str(tmp_path / "stopped")})
    *finished, stopped = on_two_ranks(contents, tmp_path, signalled=[len(tasks)])
    for expected, ranks in zip(wanted, finished, strict=True):
        for seen in ranks:
            assert seen["kinds"] == ["whole"]
            torch.testing.assert_close(seen["loss_per_step"], expected["loss_per_step"], rtol=2e-5, atol=1e-6)
            assert seen["left_out"] == expected["left_out"]
        first, second = (epochs(seen["counted"]) for seen in ranks)
        for one, other in zip(first, second, strict=True):
            assert all(a and b and a != b for a, b in zip(one[:2], other[:2], strict=True)), "rows of unlike lengths"
            assert sum(one[2:]) > 0
            assert sum(other[2:]) == 0, "in the epoch's last step this rank has nothing to count"
    assert wanted[4]["left_out"] == {"rows without text": 6}, "three in each of two epochs"
    assert stopped == [{"exit": 143}] * 2
    (saved,) = checkpoints(tmp_path / "stopped")
    verify_checkpoint(saved)
    assert saved.name == "checkpoint-3"


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_the_first_rank_alone_prints_the_result(
    rank: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    show({"output": "here"}, as_json=True)
    assert capsys.readouterr().out == ("" if rank == "1" else '{"output": "here"}\n')
