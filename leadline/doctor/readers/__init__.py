"""Readers: any framework's logs, dumps and settings, in any container, as runs in canonical quantities."""

from leadline.doctor.readers.coverage import Coverage, coverage
from leadline.doctor.readers.read import read_runs

__all__ = ["Coverage", "coverage", "read_runs"]
