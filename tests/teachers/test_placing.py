"""Where a teacher's model lies: on the GPU where there is one, unless something else has placed it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spanwise.teachers.local import LocalTeacher, move_to_gpu
from spanwise.train import distill
from tests.tiny_tokenizers import byte_level_bpe


class Loaded:
    """What move_to_gpu sees of a model. A quantised one refuses every move, as bitsandbytes' do."""

    def __init__(self, device: str, is_quantized: bool) -> None:
        self.device = torch.device(device)
        self.is_quantized = is_quantized

    def to(self, device: str) -> None:
        if self.is_quantized and self.device.type != "cpu":
            raise ValueError("`.to` is not supported")
        self.device = torch.device(device)

    def requires_grad_(self, wanted: bool) -> None:
        pass

    def get_output_embeddings(self) -> None:
        pass


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_quantised_teacher_stays_where_its_quantiser_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Loaded("cuda:0", is_quantized=True)
    monkeypatch.setattr(distill, "load_model", lambda *_, **__: model)
    teacher = distill.open_teacher(distill.TeacherSection(model="quantised"), None, byte_level_bpe())
    assert isinstance(teacher, LocalTeacher)
    assert teacher.model is model


@pytest.mark.parametrize("is_quantized", [False, True])
def test_what_lies_on_the_cpu_is_moved_unless_a_device_map_says_so(is_quantized: bool) -> None:
    found: list[Any] = []
    for device_map in (None, {"": "cpu"}):
        model = Loaded("cpu", is_quantized)
        move_to_gpu(model, device_map=device_map)
        found.append(model.device.type)
    assert found == ["cuda", "cpu"]
