from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from spanwise.train.run_folder import MANIFEST, RunFolder, checkpoints, publish_checkpoint, verify_checkpoint


def stage(folder, step, names=("model.safetensors", "optimizer.pt", "trainer_state.json")):
    staged = folder / ".staging" / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    for name in names:
        (staged / name).write_bytes(f"{name} of step {step}".encode())
    return staged


def test_a_folder_that_holds_something_is_refused_unless_resumed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty \(notes\.txt\).*--resume"), RunFolder(tmp_path / "run"):
        pass
    with RunFolder(tmp_path / "run", resume=True) as folder:
        assert folder.path.is_dir()


def test_two_runs_cannot_share_a_folder_and_a_killed_one_frees_it(tmp_path):
    code = (
        "import sys, time; from spanwise.train.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="in use by another run"), RunFolder(tmp_path / "run", resume=True):
        pass
    other.kill()
    other.communicate()
    assert other.returncode == -signal.SIGKILL
    with RunFolder(tmp_path / "run", resume=True):
        pass


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    staged = stage(tmp_path, 5)
    assert checkpoints(tmp_path) == []
    publish_checkpoint(staged, tmp_path / "checkpoint-5")
    publish_checkpoint(stage(tmp_path, 10), tmp_path / "checkpoint-10")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-10"]
    verify_checkpoint(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "no manifest", "half a manifest", "no optimizer"])
def test_a_damaged_checkpoint_is_refused_with_the_fix(tmp_path, damage):
    names = ("model.safetensors",) if damage == "no optimizer" else ("model.safetensors", "optimizer.pt")
    final = tmp_path / "checkpoint-3"
    publish_checkpoint(stage(tmp_path, 3, names), final)
    weights = final / "model.safetensors"
    if damage == "flip":
        content = bytearray(weights.read_bytes())
        content[3] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        (final / "optimizer.pt").unlink()
    elif damage == "half a manifest":
        (final / MANIFEST).write_text((final / MANIFEST).read_text()[:60])
    elif damage == "no manifest":
        (final / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"Fix: delete '.*checkpoint-3'"):
        verify_checkpoint(final)


def test_what_a_crash_left_in_staging_is_cleared(tmp_path):
    stage(tmp_path, 7)
    with RunFolder(tmp_path, resume=True) as folder:
        assert not (folder.path / ".staging").exists()
        assert checkpoints(folder.path) == []


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"), RunFolder(tmp_path / "file"):
        pass
