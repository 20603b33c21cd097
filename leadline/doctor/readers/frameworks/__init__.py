"""The frameworks whose logs can be read. A new one is a file with a table, and an entry here."""

from leadline.doctor.readers.frameworks.areal import AREAL
from leadline.doctor.readers.frameworks.art import ART, TORCHFORGE
from leadline.doctor.readers.frameworks.framework import Framework, Key, Row
from leadline.doctor.readers.frameworks.leadline import LEADLINE
from leadline.doctor.readers.frameworks.nemo_rl import NEMO_RL
from leadline.doctor.readers.frameworks.open_instruct import OPEN_INSTRUCT
from leadline.doctor.readers.frameworks.openrlhf import OPENRLHF
from leadline.doctor.readers.frameworks.prime_rl import PRIME_RL
from leadline.doctor.readers.frameworks.roll import ROLL
from leadline.doctor.readers.frameworks.skyrl import SKYRL
from leadline.doctor.readers.frameworks.slime import MILES, SLIME
from leadline.doctor.readers.frameworks.trl import TRL
from leadline.doctor.readers.frameworks.unknown import UNKNOWN
from leadline.doctor.readers.frameworks.verl import VERL

FRAMEWORKS: tuple[Framework, ...] = (
    LEADLINE,
    TRL,
    VERL,
    OPENRLHF,
    SLIME,
    MILES,
    PRIME_RL,
    AREAL,
    SKYRL,
    NEMO_RL,
    ROLL,
    OPEN_INSTRUCT,
    ART,
    TORCHFORGE,
)
"""In the order in which a tie is decided."""

__all__ = ["FRAMEWORKS", "LEADLINE", "MILES", "SLIME", "UNKNOWN", "Framework", "Key", "Row"]
