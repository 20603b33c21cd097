import json
import math

from leadline.loop.place import Place
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

DRAWN = Completion((5, 9), (-0.1, math.nan), (3, 4), FinishReason.LENGTH)
KEPT = Group(
    Prompt(7, "a prompt", (1, 2), {"answer": object()}),
    [Rollout(DRAWN, "text", {"right": 1 / 3, "style": None}, 0.1 + 0.2), Rollout(DRAWN, "", error="timed out")],
    {"generate": 1.5},
    replayed=True,
)


def test_a_place_comes_back_as_it_was_but_for_the_columns_of_its_prompts() -> None:
    place = Place(40, (43, 44), (KEPT,))
    again = Place.from_json(place.to_json())
    assert (again.position, again.ahead) == (40, (43, 44))
    (group,) = again.replay
    assert group.prompt == Prompt(7, "a prompt", (1, 2), {})
    assert repr(group.rollouts) == repr(KEPT.rollouts)  # repr: NaN is not equal to itself
    assert group.rollouts[0].reward == 0.1 + 0.2
    assert group.rollouts[0].completion.finish_reason is FinishReason.LENGTH
    assert group.replayed


def test_a_place_without_replay_or_refills_is_a_position() -> None:
    assert json.loads(Place(4).to_json()) == {"position": 4, "ahead": [], "replay": []}
    assert Place.from_json('{"position": 4}') == Place(4)
