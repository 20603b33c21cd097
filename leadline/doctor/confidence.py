"""How sure a finding is: points for and against, and the words for them.

| evidence | points |
|---|---|
| proof: hardly anything else can show it | 3 |
| strong: the usual sign | 2 |
| weak: only fits | 1 |
| each further quantity that says the same, up to two | + 0.5 |
| against, strong or proof | - 2 |
| against, weak | - 0.5 |

| points | word |
|---|---|
| 3 and more | near certain |
| 2 and more | likely |
| 1 and more | possible |
| below | unlikely |
| a fact that cannot be under this cause | ruled out |

Only what is likely or near certain is an error; what is possible is a warning; what is unlikely is no finding. The
table is leadline's choice: an error must rest on at least one usual sign that nothing contradicts.
"""

from collections.abc import Sequence

from leadline.doctor.evidence import Evidence

POINTS = {"proof": 3.0, "strong": 2.0, "weak": 1.0}
AGAINST = {"proof": 2.0, "strong": 2.0, "weak": 0.5}
SUPPORT, MOST_SUPPORT = 0.5, 2
NEAR_CERTAIN, LIKELY, POSSIBLE = 3.0, 2.0, 1.0
RULED_OUT = "ruled out"


def points(evidence: Sequence[Evidence], against: Sequence[Evidence] = ()) -> float:
    """By the table; 0 without evidence."""
    if not evidence:
        return 0.0
    best = max(POINTS[item.strength] for item in evidence)
    further = min(MOST_SUPPORT, len({item.metric for item in evidence}) - 1)
    return best + SUPPORT * further - sum(AGAINST[item.strength] for item in against)


def word(score: float) -> str:
    """The word for so many points."""
    if score >= NEAR_CERTAIN:
        return "near certain"
    if score >= LIKELY:
        return "likely"
    return "possible" if score >= POSSIBLE else "unlikely"
