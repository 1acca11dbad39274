"""What a teacher returns, and where it comes from: memory, disk, HTTP, another process."""

from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.teacher import ScoreRequest, Teacher, request_from_batch

__all__ = ["LocalTeacher", "ScoreRequest", "Teacher", "TeacherScores", "request_from_batch"]
