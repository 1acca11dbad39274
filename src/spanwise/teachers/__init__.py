"""What a teacher returns, and where it comes from: memory, disk, HTTP, another process."""

from spanwise.teachers.cache_build import CacheProgress, build_cache
from spanwise.teachers.cache_frame import CacheError, TopK
from spanwise.teachers.cache_store import CacheIdentity
from spanwise.teachers.cache_writer import CacheDiskError, CacheWriter
from spanwise.teachers.cached import CachedTeacher
from spanwise.teachers.fingerprint import model_fingerprint
from spanwise.teachers.local import LocalTeacher
from spanwise.teachers.process import SharedLogitsBuffer
from spanwise.teachers.process_teacher import DeadTeacherError, ProcessTeacher
from spanwise.teachers.scores import TeacherScores
from spanwise.teachers.served import ServedTeacher, TeacherUnreachableError
from spanwise.teachers.served_shapes import ServedScoresError
from spanwise.teachers.teacher import ScoreRequest, Teacher, request_from_batch

__all__ = [
    "CacheDiskError",
    "CacheError",
    "CacheIdentity",
    "CacheProgress",
    "CacheWriter",
    "CachedTeacher",
    "DeadTeacherError",
    "LocalTeacher",
    "ProcessTeacher",
    "ScoreRequest",
    "ServedScoresError",
    "ServedTeacher",
    "SharedLogitsBuffer",
    "Teacher",
    "TeacherScores",
    "TeacherUnreachableError",
    "TopK",
    "build_cache",
    "model_fingerprint",
    "request_from_batch",
]
