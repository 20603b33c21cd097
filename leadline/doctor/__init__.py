"""The doctor: reads what a run logged, names what is wrong, and says how it knows and what to change.

Light on purpose: no torch, nothing of the trainer. Begin at `diagnosis.py`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadline.doctor.diagnosis import diagnose
    from leadline.doctor.report import Report

__all__ = ["Report", "diagnose"]


def __getattr__(name: str) -> Any:
    """Loaded on first use: the trainer needs the rules, not the report."""
    if name == "diagnose":
        from leadline.doctor.diagnosis import diagnose

        globals()["diagnose"] = diagnose
        return diagnose
    if name == "Report":
        from leadline.doctor.report import Report

        return Report
    raise AttributeError(name)
